"""The contract of `BlockStore`, kept by every store."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_lite.offload.disk import DiskSettings, DiskStore
from grpo_lite.offload.disk_files import FileIO
from grpo_lite.offload.memory import HostMemory
from grpo_lite.offload.stores import PinnedStore

SIZES = {0: 100, 1: 4096, 5: 10_000, 7: 4097, 8: 1}


class BufferedIO(FileIO):
    """A file system without direct I/O."""

    def open(self, path, flags):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return super().open(path, flags)


class ShortIO(FileIO):
    """A file system that never does more than a page and a half at once."""

    def pwrite(self, fd, data, offset):
        return super().pwrite(fd, data[:4096] if len(data) > 6144 else data, offset)

    def preadv(self, fd, into, offset):
        return super().preadv(fd, into[:4096] if len(into) > 6144 else into, offset)


STORES = {
    "ram": lambda folder: PinnedStore(SIZES, HostMemory()),
    "disk": lambda folder: DiskStore(folder, SIZES, HostMemory()),
    "disk, one slot, two buffers": lambda folder: DiskStore(
        folder, SIZES, HostMemory(), settings=DiskSettings(num_slots=1, num_buffers=2)
    ),
    "disk, buffered": lambda folder: DiskStore(
        folder, SIZES, HostMemory(), settings=DiskSettings(io=BufferedIO())
    ),
    "disk, short transfers": lambda folder: DiskStore(
        folder, SIZES, HostMemory(), settings=DiskSettings(io=ShortIO())
    ),
}


@pytest.fixture(params=STORES)
def make(request, tmp_path):
    opened = []

    def open_store():
        for store in opened:
            store.close()
        opened.append(STORES[request.param](tmp_path))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def content(key, version):
    generator = torch.Generator().manual_seed(1000 * version + key)
    return torch.randint(0, 256, (SIZES[key],), dtype=torch.uint8, generator=generator)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["write", "read", "prefetch", "settle"]), st.sampled_from([*SIZES])
        ),
        max_size=40,
    )
)
def test_what_was_put_last_is_what_comes_back(make, actions):
    """A stale or torn block is a wrong number in the weights, and nobody would notice."""
    store = make()
    versions = {}
    for number, (action, key) in enumerate(actions):
        if action == "write":
            store.fetch(key, fresh=True)[: SIZES[key]] = content(key, number)
            store.put(key)
            versions[key] = number
        elif action == "prefetch":
            store.prefetch([key, *SIZES])
        elif action == "settle":
            store.settle()
        elif key in versions:
            assert torch.equal(store.fetch(key)[: SIZES[key]], content(key, versions[key]))
            store.put(key, changed=False)
    for key, number in versions.items():
        assert torch.equal(store.fetch(key)[: SIZES[key]], content(key, number))
        store.put(key, changed=False)


def test_a_record_may_be_changed_in_place_while_it_is_lent(make):
    store = make()
    store.fetch(5, fresh=True)[:] = 1
    store.put(5)
    for _ in range(3):
        store.fetch(5).add_(1)
        store.put(5)
        for other in (0, 1, 7, 8):  # push record 5 out of every buffer
            store.fetch(other, fresh=True).zero_()
            store.put(other)
    assert (store.fetch(5) == 4).all()


def test_records_begin_on_a_page(make):
    """Direct I/O refuses memory that does not, and fp32 views need four bytes."""
    store = make()
    for key in SIZES:
        assert store.fetch(key, fresh=True).data_ptr() % 4096 == 0
        store.put(key)


def test_close_may_come_twice(make):
    store = make()
    store.close()
    store.close()
