"""Torch's CUDA caching allocator replayed on a log of events: what is allocated, what is reserved.

Follows c10/cuda/CUDACachingAllocator.cpp (torch 2.x) on one stream: sizes are rounded to 512 bytes,
small and large requests have pools of their own, a miss asks the driver for a segment, a block is
split where enough is left of it, neighbours merge when they are freed, and a segment that the
driver refuses is asked for again after all unused segments are given back.
Pure arithmetic; knows no torch and no model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from grpo_lite.units import MIB

ROUND_BYTES = 512
"""kMinBlockSize: every request is a multiple of it."""
SMALL_BYTES = MIB
"""kSmallSize: the largest request that the small pool serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""kSmallBuffer: a segment of the small pool."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""kLargeBuffer: a segment for requests below MIN_OWN_SEGMENT_BYTES."""
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""kMinLargeAlloc: from here on a request gets a segment of its own size, rounded up."""
ROUND_SEGMENT_BYTES = 2 * MIB
"""kRoundLarge: what such a segment is rounded up to."""


@dataclass(frozen=True, slots=True)
class Event:
    """One call of the allocator: an allocation, a release, or the giving back of unused segments.

    `num_bytes` above 0 allocates tensor `key`, 0 frees it; `key` None is `empty_cache()`.
    """

    key: int | None
    num_bytes: int = 0


class OutOfMemory(Exception):
    """The limit is reached although every unused segment was given back."""

    def __init__(self, asked_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{asked_bytes} bytes asked, {free_bytes} free")
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    is_small: bool
    order: int
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass(slots=True)
class _Pool:
    """Free blocks by size, then by age: the first that is large enough is the best fit."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        insort(self.keys, (block.size, block.order))
        self.blocks[block.order] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.order))]
        del self.blocks[block.order]

    def best_fit(self, size: int) -> _Block | None:
        place = bisect_left(self.keys, (size, -1))
        return self.blocks[self.keys[place][1]] if place < len(self.keys) else None


class CachingAllocator:
    """The allocator of one process on one stream.

    `limit_bytes`: what the driver has for it (None: as much as is asked for).
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._live: dict[int, _Block] = {}
        self._order = 0

    def allocate(self, key: int, num_bytes: int) -> None:
        """Allocate tensor `key`.

        Raises:
            OutOfMemory: the limit does not hold it.
        """
        size = -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
        is_small = size <= SMALL_BYTES
        pool = self._pools[is_small]
        block = pool.best_fit(size)
        if block is None:
            block = self._new_segment(size, is_small=is_small)
        else:
            pool.remove(block)
        self._split(block, size)
        block.is_free = False
        self._live[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: int) -> None:
        """Free tensor `key`; its memory stays reserved."""
        block = self._live.pop(key)
        self.allocated_bytes -= block.size
        block.is_free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._pools[block.is_small].remove(neighbour)
                self._merge(block, neighbour)
        self._pools[block.is_small].add(block)

    def empty_cache(self) -> None:
        """Give back every segment in which nothing lives."""
        for pool in self._pools.values():
            for block in [b for b in pool.blocks.values() if b.is_whole_segment]:
                pool.remove(block)
                self.reserved_bytes -= block.size

    def reset_peaks(self) -> None:
        """Start new peaks from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_segment(self, size: int, *, is_small: bool) -> _Block:
        if is_small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < MIN_OWN_SEGMENT_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES
        if self._is_beyond_limit(segment_bytes):
            self.empty_cache()
            if self._is_beyond_limit(segment_bytes):
                assert self.limit_bytes is not None
                raise OutOfMemory(segment_bytes, self.limit_bytes - self.reserved_bytes)
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return self._block(segment_bytes, is_small=is_small)

    def _is_beyond_limit(self, segment_bytes: int) -> bool:
        return (
            self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes
        )

    def _split(self, block: _Block, size: int) -> None:
        """Cut `block` down to `size` where what is left is worth keeping apart."""
        left = block.size - size
        if not (left >= ROUND_BYTES if block.is_small else left > SMALL_BYTES):
            return
        rest = self._block(left, is_small=block.is_small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._pools[block.is_small].add(rest)

    @staticmethod
    def _merge(block: _Block, neighbour: _Block) -> None:
        """Take `neighbour`, which lies before or after it, into `block`."""
        block.size += neighbour.size
        if neighbour is block.before:
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
            return
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block

    def _block(self, size: int, *, is_small: bool) -> _Block:
        self._order += 1
        return _Block(size=size, is_small=is_small, order=self._order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the allocator held over a log."""

    allocated_bytes: int
    """Peak of blocks in use (`max_memory_allocated`)."""
    reserved_bytes: int
    """Peak of segments (`max_memory_reserved`)."""


def replay(
    resting: Iterable[Event], steps: Iterable[Iterable[Event]], *, limit_bytes: int | None = None
) -> Replay:
    """Return the peaks of the last of `steps`, run after `resting` on one allocator.

    Raises:
        OutOfMemory: the limit does not hold them.
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    run(allocator, resting)
    for step in steps:
        allocator.reset_peaks()
        run(allocator, step)
    return Replay(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
    )


def run(allocator: CachingAllocator, events: Iterable[Event]) -> None:
    """Run `events` on `allocator`."""
    for event in events:
        if event.key is None:
            allocator.empty_cache()
        elif event.num_bytes:
            allocator.allocate(event.key, event.num_bytes)
        else:
            allocator.free(event.key)
