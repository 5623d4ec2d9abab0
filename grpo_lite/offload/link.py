"""The way between card and RAM: gradients out, weights in, hidden behind compute where it can be.

`DirectLink` serves cards whose memory is RAM; `CudaLink` copies through a ring of pinned slots, on
two streams of its own, with a worker thread that waits for what lands.
Knows chunks of elements, not blocks.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from grpo_lite.offload.memory import HostMemory
from grpo_lite.units import MIB

CHUNK_ELEMENTS = 2**18
"""Elements that are cast or summed at a time: 1 MiB of fp32 stays in a core's cache."""
SLOT_BYTES = 4 * MIB
"""One pinned slot; copies of this size reach the link's full speed."""
NUM_SLOTS = 16
"""Slots in each direction."""
LINK_BYTES = 2 * NUM_SLOTS * SLOT_BYTES
"""Pinned RAM that a `CudaLink` takes."""

Consumer = Callable[[torch.Tensor, int], None]
"""Takes a flat host tensor and the index of its first element in the source."""


class Link(Protocol):
    """Copies between the card and host memory.

    Contract:
        `to_host` hands every element of `source` to `consume`, in order, perhaps later and in
        another thread, perhaps in parts; consumers never run at the same time.
        The caller may drop `source` at once. `drain` returns when every consumer has run and raises
        what one of them raised.
        `to_card` has read `source` when it returns; `join` orders the card's coming work behind all
        copies to it.
    """

    def to_host(self, source: torch.Tensor, consume: Consumer) -> None:
        """Give the elements of the flat card tensor `source` to `consume`."""
        ...

    def drain(self) -> None:
        """Wait until all that was sent to the host has been consumed."""
        ...

    def to_card(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy flat host `source` into flat card `target`, cast to its dtype."""
        ...

    def join(self) -> None:
        """Let the card's coming work wait for what is on its way to it."""
        ...

    def close(self) -> None:
        """Stop threads and free slots."""
        ...


class DirectLink:
    """A `Link` to a card whose memory is RAM: nothing is copied on the way out."""

    def to_host(self, source: torch.Tensor, consume: Consumer) -> None:
        """Give `source` itself to `consume`, now."""
        consume(source, 0)

    def drain(self) -> None:
        """Return: consumers have run."""

    def to_card(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` into `target`, now."""
        target.copy_(source)

    def join(self) -> None:
        """Return: copies are done."""

    def close(self) -> None:
        """Do nothing."""


class CudaLink:
    """A `Link` to a CUDA device, over pinned slots and two persistent streams.

    The slots are pinned once: pinning inside hooks is slow, and fresh streams leak allocator pools.
    """

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        self._device = device
        self._out_stream = torch.cuda.Stream(device)
        self._in_stream = torch.cuda.Stream(device)
        self._out_slots = memory.pinned(NUM_SLOTS * SLOT_BYTES).view(NUM_SLOTS, SLOT_BYTES)
        self._in_slots = memory.pinned(NUM_SLOTS * SLOT_BYTES).view(NUM_SLOTS, SLOT_BYTES)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        self._in_events = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self._next_in = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grpo-lite-land")
        self._landing: deque[Future[None]] = deque()

    def to_host(self, source: torch.Tensor, consume: Consumer) -> None:
        """Copy `source` slot by slot behind the stream that made it; the worker consumes."""
        self._out_stream.wait_stream(torch.cuda.current_stream(self._device))
        step = SLOT_BYTES // source.element_size()
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            slot = self._free.get()  # waits until the worker has consumed the oldest
            landing = self._out_slots[slot].view(source.dtype)[: part.numel()]
            with torch.cuda.stream(self._out_stream):
                landing.copy_(part, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._out_stream)
            self._landing.append(
                self._worker.submit(self._land, event, slot, landing, consume, start)
            )
        # the caller drops `source`: its memory must not be reused before the copies are done
        source.record_stream(self._out_stream)

    def drain(self) -> None:
        """Wait until the worker has consumed every slot; raise what a consumer raised first."""
        failure: BaseException | None = None
        while self._landing:
            failure = self._landing.popleft().exception() or failure
        if failure is not None:
            raise failure

    def to_card(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Cast `source` into pinned slots and copy them on the inward stream."""
        self._in_stream.wait_stream(torch.cuda.current_stream(self._device))
        step = SLOT_BYTES // target.element_size()
        for start in range(0, source.numel(), step):
            part = target[start : start + step]
            event = self._in_events[self._next_in]
            event.synchronize()  # the slot's last copy has left it
            slot = self._in_slots[self._next_in].view(target.dtype)[: part.numel()]
            slot.copy_(source[start : start + step])
            with torch.cuda.stream(self._in_stream):
                part.copy_(slot, non_blocking=True)
                event.record(self._in_stream)
            self._next_in = (self._next_in + 1) % NUM_SLOTS

    def join(self) -> None:
        """Let the current stream wait for the inward stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._in_stream)

    def close(self) -> None:
        """Stop the worker and wait for both streams."""
        self._worker.shutdown()
        self._out_stream.synchronize()
        self._in_stream.synchronize()

    def _land(
        self,
        event: torch.cuda.Event,
        slot: int,
        landing: torch.Tensor,
        consume: Consumer,
        start: int,
    ) -> None:
        try:
            event.synchronize()
            with torch.no_grad():
                consume(landing, start)
        finally:
            self._free.put(slot)


def link_to(device: torch.device, memory: HostMemory) -> Link:
    """Return the link to `device`."""
    return CudaLink(device, memory) if device.type == "cuda" else DirectLink()
