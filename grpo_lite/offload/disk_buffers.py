"""The few records that the disk tier keeps in RAM while they are read, used and written.

Knows buffers and what they are busy with; files and checksums are `disk`'s.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

import torch

from grpo_lite.offload.memory import HostMemory


class Use(StrEnum):
    """What a buffer is used for."""

    IDLE = "idle"  # holds what is on disk under `key`, or nothing (key None)
    READING = "reading"
    LENT = "lent"
    QUEUED = "queued"  # given back, waits until the last generation is committed
    WRITING = "writing"
    FAILED = "failed"  # holds the only copy of what a write could not store


@dataclass(slots=True, kw_only=True)
class Buffer:
    """Memory for one record."""

    memory: torch.Tensor
    """uint8, beginning on a page, as long as the largest record."""
    key: int | None = None
    """The record that it holds; None: nothing."""
    use: Use = Use.IDLE
    """What it is used for."""
    future: Future[None] | None = None
    """The last read or write of it."""
    used_at: int = 0
    """When it was touched last, on the ring's clock."""

    @property
    def is_busy(self) -> bool:
        """Whether a thread reads into it or writes from it."""
        return self.future is not None and not self.future.done()

    def wait(self) -> BaseException | None:
        """Wait for the last read or write and return its error."""
        assert self.future is not None, "nothing was begun"
        return self.future.exception()

    def empty(self) -> None:
        """Hold nothing."""
        self.key, self.use, self.future = None, Use.IDLE, None

    def record(self, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes`."""
        return self.memory[:num_bytes]


class BufferRing:
    """All buffers of one store."""

    def __init__(self, num_buffers: int, capacity_bytes: int, memory: HostMemory) -> None:
        self.buffers = [Buffer(memory=memory.record(capacity_bytes)) for _ in range(num_buffers)]
        self._clock = 0

    def find(self, key: int) -> Buffer | None:
        """Return the buffer that holds record `key`."""
        return next((buffer for buffer in self.buffers if buffer.key == key), None)

    def having(self, use: Use) -> list[Buffer]:
        """Return the buffers that are used for `use`."""
        return [buffer for buffer in self.buffers if buffer.use is use]

    def touch(self, buffer: Buffer) -> None:
        """Note that `buffer` is used now."""
        self._clock += 1
        buffer.used_at = self._clock

    def free(self, *, keep: Collection[int] = ()) -> Buffer | None:
        """Return an idle buffer that holds none of `keep`; None where there is none.

        Empty ones come first, then the longest unused.
        """
        for buffer in self.having(Use.WRITING):
            if not buffer.is_busy and buffer.wait() is None:
                buffer.use = Use.IDLE
        idle = [buffer for buffer in self.having(Use.IDLE) if buffer.key not in keep]
        return min(idle, key=lambda buffer: (buffer.key is not None, buffer.used_at), default=None)
