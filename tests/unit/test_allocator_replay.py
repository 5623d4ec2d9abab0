"""The replay of torch's caching allocator: hand-made logs with the answers of its source code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lite.predict.allocator import CachingAllocator, Event, OutOfMemory, replay
from grpo_lite.units import MIB


def held_after(*sizes):
    """Return (allocated, reserved) after allocating `sizes`."""
    allocator = CachingAllocator()
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (129 * MIB + 1, 130 * MIB, 130 * MIB),
    ],
)
def test_one_tensor_takes_the_segment_of_its_class(size, allocated, reserved):
    """Wrong size classes would shift every reserved figure; the last row keeps its slack."""
    assert held_after(size) == (allocated, reserved)


def test_small_before_large_reserves_twice_what_large_before_small_does():
    """Freed small segments never serve a larger request: the order of a step counts."""

    def reserved(first, second):
        events = [Event(i, s * MIB) for i, s in enumerate(first)]
        events += [Event(i) for i in range(len(first))]
        events += [Event(100 + i, s * MIB) for i, s in enumerate(second)]
        return replay([], [events]).reserved_bytes

    assert reserved([16] * 8, [32] * 4) == 256 * MIB
    assert reserved([32] * 4, [16] * 8) == 128 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough():
    """A first fit would cut up the large block and reserve a third segment."""
    allocator = CachingAllocator()
    allocator.allocate(0, 64 * MIB)
    allocator.allocate(1, 32 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 30 * MIB)
    allocator.allocate(3, 64 * MIB)
    assert allocator.reserved_bytes == 96 * MIB


def test_a_remainder_of_at_most_a_mebibyte_counts_as_allocated():
    """torch's own max_memory_allocated includes such slack; without it quantised models miss."""
    allocator = CachingAllocator()
    allocator.allocate(0, 12 * MIB)
    allocator.free(0)
    allocator.allocate(1, 11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB


def test_unused_segments_are_given_back_before_the_limit_is_an_error():
    """A reserved figure above the card is no out-of-memory as long as it can be given back."""
    events = [Event(0, 60 * MIB), Event(0), Event(1, 80 * MIB)]
    assert replay([], [events], limit_bytes=100 * MIB).allocated_bytes == 80 * MIB
    pinned = [Event(0, 60 * MIB), Event(2, 50 * MIB), Event(0), Event(1, 80 * MIB)]
    with pytest.raises(OutOfMemory) as caught:
        replay([], [pinned], limit_bytes=100 * MIB)
    assert caught.value.asked_bytes == 50 * MIB


def test_only_whole_unused_segments_are_given_back_by_empty_cache():
    """A segment with one live tensor stays whole: that is how fragmentation holds memory."""
    allocator = CachingAllocator()
    allocator.allocate(0, 40 * MIB)
    allocator.free(0)
    allocator.allocate(1, 4 * MIB)
    allocator.allocate(2, 64 * MIB)
    allocator.free(2)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB


@given(st.lists(st.integers(1, 40 * MIB), max_size=30), st.randoms())
def test_after_all_is_freed_everything_can_be_given_back(sizes, random):
    """Blocks that are lost or merged wrongly would stay behind."""
    allocator = CachingAllocator()
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
        assert sum(sizes[: key + 1]) <= allocator.allocated_bytes <= allocator.reserved_bytes
    keys = list(range(len(sizes)))
    random.shuffle(keys)
    for key in keys:
        allocator.free(key)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_peaks_are_those_of_the_last_step():
    """Peaks of loading are another phase's; the cache that it leaves is not."""
    result = replay([Event(0, 50 * MIB), Event(0)], [[Event(1, 30 * MIB), Event(1)]])
    assert (result.allocated_bytes, result.reserved_bytes) == (30 * MIB, 50 * MIB)
