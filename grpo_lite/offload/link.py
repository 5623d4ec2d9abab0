"""The way between card and RAM: gradients out, weights in, hidden behind compute where it can be.

`DirectLink` serves cards whose memory is RAM; `CudaLink` copies through a ring of pinned slots, on
two streams of its own, with a worker thread that waits for what lands.
Knows chunks of elements, not blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

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
IN_FLIGHT_BYTES = 64 * MIB
"""Gradients on the card that may wait for a `CudaLink` where the largest one is smaller."""

Consumer = Callable[[torch.Tensor, int], None]
"""Takes a flat host tensor and the index of its first element in the source."""


class Link(Protocol):
    """Copies between the card and host memory.

    Contract:
        `to_host` hands every element of `source` to `consume`, in order, perhaps later and in
        another thread, perhaps in parts; consumers never run at the same time.
        The caller may drop `source` at once and not change it before `drain`, which
        returns when every consumer has run and raises what one of them raised.
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
    Backward does not wait for copies before `in_flight_bytes` of gradients do: it would leave the
    card without work.
    """

    def __init__(
        self,
        device: torch.device,
        memory: HostMemory,
        *,
        in_flight_bytes: int,
        cuda: Any = torch.cuda,
    ) -> None:
        """`cuda` makes streams and events; tests without a card hand in another."""
        self._device = device
        self._cuda = cuda
        self._out_stream = cuda.Stream(device)
        self._in_stream = cuda.Stream(device)
        self._out_slots = memory.pinned(NUM_SLOTS * SLOT_BYTES).view(NUM_SLOTS, SLOT_BYTES)
        self._in_slots = memory.pinned(NUM_SLOTS * SLOT_BYTES).view(NUM_SLOTS, SLOT_BYTES)
        self._out_events = [cuda.Event() for _ in range(NUM_SLOTS)]
        self._in_events = [cuda.Event() for _ in range(NUM_SLOTS)]
        self._next_in = 0
        self._in_flight_bytes = 0
        self._limit_bytes = in_flight_bytes
        self._room = threading.Condition()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grpo-lite-link")
        self._jobs: deque[Future[None]] = deque()

    def to_host(self, source: torch.Tensor, consume: Consumer) -> None:
        """Let the worker copy and consume `source` once the stream that makes it has done so."""
        made = self._cuda.Event()
        made.record(self._cuda.current_stream(self._device))
        with self._room:
            self._room.wait_for(
                lambda: (
                    not self._in_flight_bytes
                    or self._in_flight_bytes + source.nbytes <= self._limit_bytes
                )
            )
            self._in_flight_bytes += source.nbytes
        while self._jobs and self._jobs[0].done() and self._jobs[0].exception() is None:
            self._jobs.popleft()
        self._jobs.append(self._worker.submit(self._carry, source, made, consume))

    def drain(self) -> None:
        """Wait until the worker has consumed everything; raise what a consumer raised first."""
        failure: BaseException | None = None
        while self._jobs:
            error = self._jobs.popleft().exception()
            failure = failure or error
        if failure is not None:
            raise failure

    def to_card(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Cast `source` into pinned slots and copy them on the inward stream."""
        self._in_stream.wait_stream(self._cuda.current_stream(self._device))
        step = SLOT_BYTES // target.element_size()
        for start in range(0, source.numel(), step):
            part = target[start : start + step]
            event = self._in_events[self._next_in]
            event.synchronize()  # the slot's last copy has left it
            slot = self._in_slots[self._next_in].view(target.dtype)[: part.numel()]
            slot.copy_(source[start : start + step])
            with self._cuda.stream(self._in_stream):
                part.copy_(slot, non_blocking=True)
                event.record(self._in_stream)
            self._next_in = (self._next_in + 1) % NUM_SLOTS

    def join(self) -> None:
        """Let the current stream wait for the inward stream."""
        self._cuda.current_stream(self._device).wait_stream(self._in_stream)

    def close(self) -> None:
        """Stop the worker and wait for both streams."""
        self._worker.shutdown()
        self._out_stream.synchronize()
        self._in_stream.synchronize()

    def _carry(self, source: torch.Tensor, made: Any, consume: Consumer) -> None:
        """Copy `source` through the slots and consume them; in the worker.

        The worker keeps `source` alive until its copies are done, so that its memory, which
        belongs to another stream, needs no other guard.
        """
        step = SLOT_BYTES // source.element_size()
        starts = range(0, source.numel(), step)
        try:
            self._out_stream.wait_event(made)
            with torch.no_grad(), self._cuda.stream(self._out_stream):
                for number in range(len(starts) + NUM_SLOTS):
                    landed = number - NUM_SLOTS  # the slot that is about to be used again
                    if 0 <= landed < len(starts):
                        self._out_events[landed % NUM_SLOTS].synchronize()
                        consume(self._landing(source, landed), starts[landed])
                    if number < len(starts):
                        part = source[starts[number] : starts[number] + step]
                        self._landing(source, number).copy_(part, non_blocking=True)
                        self._out_events[number % NUM_SLOTS].record(self._out_stream)
        finally:
            with self._room:
                self._in_flight_bytes -= source.nbytes
                self._room.notify()

    def _landing(self, source: torch.Tensor, number: int) -> torch.Tensor:
        """Return where part `number` of `source` lands: its slot, as long as the part."""
        step = SLOT_BYTES // source.element_size()
        length = min(step, source.numel() - number * step)
        return self._out_slots[number % NUM_SLOTS].view(source.dtype)[:length]


def link_to(device: torch.device, memory: HostMemory, *, in_flight_bytes: int) -> Link:
    """Return the link to `device`; `in_flight_bytes` of gradients may wait to be copied."""
    if device.type == "cuda":
        return CudaLink(device, memory, in_flight_bytes=in_flight_bytes)
    return DirectLink()
