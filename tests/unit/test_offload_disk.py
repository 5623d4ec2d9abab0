"""The disk tier's folder, its generations, and what it does when the disk fails."""

import errno
import logging
import os
import subprocess
import sys

import pytest
import torch

from grpo_lite.errors import StoreError, UsageError
from grpo_lite.offload import disk_files
from grpo_lite.offload.disk import DiskSettings, DiskStore
from grpo_lite.offload.disk_files import FileIO, claim_folder
from grpo_lite.offload.memory import HostMemory

SIZES = {0: 5000, 1: 5000, 2: 5000, 3: 5000}


class BrokenIO(FileIO):
    """Raises or damages where told."""

    def __init__(self):
        self.write_errno = None
        self.read_errnos = []
        self.flips = 0
        self.replace_errno = None
        self.writes = 0

    def pwrite(self, fd, data, offset):
        self.writes += 1
        if self.write_errno is not None:
            raise OSError(self.write_errno, os.strerror(self.write_errno))
        return super().pwrite(fd, data, offset)

    def preadv(self, fd, into, offset):
        if self.read_errnos:
            code = self.read_errnos.pop()
            raise OSError(code, os.strerror(code))
        count = super().preadv(fd, into, offset)
        if self.flips:
            self.flips -= 1
            into[17] ^= 4
        return count

    def replace(self, source, target):
        if self.replace_errno is not None:
            raise OSError(self.replace_errno, os.strerror(self.replace_errno))
        super().replace(source, target)


@pytest.fixture
def io():
    return BrokenIO()


@pytest.fixture
def open_store(tmp_path, io):
    stores = []

    def open_it(**options):
        fingerprint = options.pop("fingerprint", "one")
        sizes = options.pop("sizes", SIZES)
        store = DiskStore(
            tmp_path,
            sizes,
            HostMemory(),
            fingerprint=fingerprint,
            settings=DiskSettings(io=io, **options),
        )
        stores.append(store)
        return store

    yield open_it
    io.write_errno = io.replace_errno = None
    for store in stores:
        store.close()


def fill(store, value, keys=SIZES):
    for key in keys:
        store.fetch(key, fresh=True).fill_(value + key)
        store.put(key)


def values(store):
    found = {}
    for key in SIZES:
        record = store.fetch(key)
        assert (record[:5000] == record[0]).all()
        found[key] = int(record[0])
        store.put(key, changed=False)
    return found


def test_a_new_run_takes_up_the_last_committed_generation_not_the_torn_one(open_store):
    """A process killed in the middle of a step must find the whole step before it."""
    store = open_store(resume=True)
    fill(store, 10)
    store.commit({"step": 1})
    store.settle()
    fill(store, 20, keys=[0, 2])  # the process dies here
    store.close(keep_files=True)
    again = open_store(resume=True)
    assert again.meta == {"step": 1}
    assert values(again) == {0: 10, 1: 11, 2: 12, 3: 13}


def test_generations_alternate_between_the_slots_however_often_a_record_is_skipped(open_store):
    store = open_store(resume=True)
    fill(store, 0)
    store.commit({"step": 0})
    for step in range(1, 6):
        fill(store, 10 * step, keys=[0, 1] if step % 2 else [0, 2])
        store.commit({"step": step})
    store.close(keep_files=True)
    again = open_store(resume=True)
    assert again.meta == {"step": 5}
    assert values(again) == {0: 50, 1: 51, 2: 42, 3: 3}


def test_without_resume_files_are_removed_at_start_and_at_the_end(open_store, tmp_path, caplog):
    """Orphans of killed runs fill disks."""
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({})
    store.close(keep_files=True)
    assert list(tmp_path.rglob("*.bin"))
    with caplog.at_level(logging.WARNING):
        open_store().close()
    assert "an earlier run left" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_generation_of_another_model_is_refused_and_kept(open_store, tmp_path):
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({"step": 3})
    store.close(keep_files=True)
    with pytest.raises(UsageError, match="another model"):
        open_store(resume=True, fingerprint="two")
    again = open_store(resume=True)
    assert again.meta == {"step": 3}


def test_a_missing_file_of_a_generation_is_named(open_store, tmp_path):
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({})
    store.close(keep_files=True)
    next(tmp_path.rglob("block-00002.bin")).unlink()
    with pytest.raises(StoreError, match=r"lacks block-00002\.bin"):
        open_store(resume=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99}'])
def test_a_damaged_manifest_is_a_clear_error(open_store, tmp_path, text):
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({})
    store.close(keep_files=True)
    next(tmp_path.rglob("manifest.json")).write_text(text)
    with pytest.raises(StoreError, match="manifest"):
        open_store(resume=True)


def test_a_flipped_bit_on_the_way_is_read_again(open_store, io):
    store = open_store(num_buffers=1)
    fill(store, 1)
    store.settle()
    io.flips = 1
    assert values(store) == {0: 1, 1: 2, 2: 3, 3: 4}


def test_a_flipped_bit_on_the_medium_is_an_error_never_a_number(open_store, io):
    store = open_store(num_buffers=1)
    fill(store, 1)
    store.settle()
    io.flips = 2
    with pytest.raises(StoreError, match="other bytes than were written"):
        store.fetch(0)
    assert values(store) == {0: 1, 1: 2, 2: 3, 3: 4}


def test_a_read_error_is_tried_again_once(open_store, io):
    store = open_store(num_buffers=1)
    fill(store, 1)
    store.settle()
    io.read_errnos = [errno.EIO]
    assert values(store) == {0: 1, 1: 2, 2: 3, 3: 4}
    io.read_errnos = [errno.EIO, errno.EIO]
    with pytest.raises(StoreError, match=r"cannot read .* at byte 0.*errno 5"):
        store.fetch(1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_loses_nothing_and_is_tried_again(open_store, io, code):
    """The only copy of an updated block is the one in RAM: it must stay there."""
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({"step": 1})
    store.settle()
    io.write_errno = code
    with pytest.raises(StoreError, match=f"cannot write.*errno {code}"):
        fill_and_settle(store, 50)
    with pytest.raises(StoreError):
        store.settle()
    io.write_errno = None
    store.settle()
    store.commit({"step": 2})
    store.settle()
    found = values(store)
    store.close(keep_files=True)
    again = open_store(resume=True)
    assert values(again) == found
    assert again.meta == {"step": 2}


def fill_and_settle(store, value):
    fill(store, value, keys=[0, 1])
    store.settle()


def test_no_generation_is_committed_before_a_failed_write_is_repeated(open_store, io):
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({"step": 1})
    store.settle()
    io.write_errno = errno.EIO
    store.fetch(0).fill_(99)
    try:
        store.put(0)
        store.commit({"step": 2})
        store.settle()
    except StoreError:
        pass
    store.close(keep_files=True)
    io.write_errno = None
    again = open_store(resume=True)
    assert again.meta == {"step": 1}
    assert values(again)[0] == 1


def test_records_move_to_spare_ram_when_the_disk_is_full(open_store, io, caplog):
    store = open_store(spare_bytes=4 * 8192)
    fill(store, 1)
    store.settle()
    io.write_errno = errno.ENOSPC
    with caplog.at_level(logging.WARNING):
        fill(store, 60)
        store.settle()
    assert "stays in RAM" in caplog.text
    assert values(store) == {0: 60, 1: 61, 2: 62, 3: 63}


def test_a_manifest_that_cannot_be_replaced_is_tried_again(open_store, io):
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({"step": 1})
    store.settle()
    io.replace_errno = errno.EIO
    fill(store, 30)
    store.commit({"step": 2})
    with pytest.raises(StoreError, match="manifest"):
        store.settle()
    io.replace_errno = None
    store.settle()
    store.close(keep_files=True)
    again = open_store(resume=True)
    assert again.meta == {"step": 2}
    assert values(again) == {0: 30, 1: 31, 2: 32, 3: 33}


def test_a_durable_commit_is_the_same_generation(open_store):
    store = open_store(resume=True)
    fill(store, 1)
    store.commit({"step": 1}, durable=True)
    store.settle()
    store.close(keep_files=True)
    assert values(open_store(resume=True)) == {0: 1, 1: 2, 2: 3, 3: 4}


def test_a_mapped_record_is_what_was_put(open_store):
    store = open_store()
    fill(store, 1)
    fill(store, 40)
    store.commit({})
    assert (store.mapped(2)[:5000] == 42).all()


def test_bytes_are_counted(open_store):
    store = open_store(num_buffers=1)
    fill(store, 1)
    store.settle()
    assert store.written_bytes == 4 * 8192
    values(store)
    assert store.read_bytes == 4 * 8192  # one buffer holds none of them but the last


def test_a_missing_folder_is_named_with_its_remedy(tmp_path):
    with pytest.raises(UsageError, match="is not a folder") as refused:
        claim_folder(tmp_path / "no" / "ours", 1)
    assert refused.value.hint == f"mkdir -p {tmp_path / 'no'}"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ours").write_text("a file where our folder should be")
    with pytest.raises(UsageError, match="cannot be written"):
        claim_folder(tmp_path / "ours", 1)


def test_a_disk_that_is_too_small_is_refused_with_numbers(tmp_path):
    with pytest.raises(UsageError, match=r"needs 1048576 GiB|needs .* GiB"):
        claim_folder(tmp_path / "ours", 2**60)


def test_space_that_cannot_be_reserved_leaves_no_files(tmp_path):
    class Full(FileIO):
        def allocate(self, fd, num_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreError, match="cannot reserve"):
        DiskStore(tmp_path, SIZES, HostMemory(), settings=DiskSettings(io=Full()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "words"),
    [("9p", "9p"), ("nfs4", "a network share"), ("cifs", "a network share"), ("tmpfs", "is RAM")],
)
def test_remote_folders_and_ram_disks_are_refused(tmp_path, monkeypatch, kind, words):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 8:2 / {tmp_path} rw,relatime shared:1 - {kind} source rw\n"
    )
    monkeypatch.setattr(disk_files, "_MOUNTS", mounts)
    with pytest.raises(UsageError, match=words):
        claim_folder(tmp_path / "ours", 1)


def test_a_folder_in_use_is_refused_with_the_process(tmp_path):
    """Two runs in one folder would overwrite each other's blocks."""
    script = (
        "import sys, pathlib; from grpo_lite.offload.disk_files import claim_folder\n"
        "claim_folder(pathlib.Path(sys.argv[1]), 1); print('ready', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "ours")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(UsageError, match=f"in use by process {other.pid}"):
            claim_folder(tmp_path / "ours", 1)
        other.kill()  # the lock dies with its process
        other.wait()
        _, lock = claim_folder(tmp_path / "ours", 1)
        os.close(lock)
    finally:
        other.communicate()


def test_memory_of_records_is_counted():
    memory = HostMemory()
    assert memory.record(4096).dtype == torch.uint8
    assert memory.allocated_bytes == 8192
