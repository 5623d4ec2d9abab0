"""The store on NVMe: preallocated files, one reader and one writer thread, whole generations.

Records are written to the slot that the manifest does not name, and the manifest is replaced last:
a process that dies at any instant leaves one whole generation behind.
Every record that is read is compared with the checksum of what was written.
"""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from grpo_lite.errors import StoreError
from grpo_lite.offload.blocks import BlockStatus
from grpo_lite.offload.disk_buffers import Buffer, BufferRing, Use
from grpo_lite.offload.disk_files import BlockFile, FileIO, claim_folder, release_folder
from grpo_lite.offload.generations import Generations
from grpo_lite.offload.memory import HostMemory
from grpo_lite.offload.placement import STATE_BUFFERS, STATE_SLOTS, record_bytes
from grpo_lite.units import format_bytes

logger = logging.getLogger(__name__)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """How a disk store works."""

    num_buffers: int = STATE_BUFFERS
    """Records in RAM at once: one read, one lent, one written."""
    num_slots: int = STATE_SLOTS
    """Copies of each record on disk; 1 for what nobody resumes from."""
    largest_bytes: int = 0
    """Size of the largest record that may be added later."""
    spare_bytes: int = 0
    """RAM that records may move to for good when the disk is full."""
    resume: bool = False
    """Take up the generation that is there, and leave one if the process ends before `close`."""
    folder: str = "grpo-lite-blocks"
    """Name of the store's own folder inside the user's; nothing outside it is ever removed."""
    io: FileIO = field(default_factory=FileIO)
    """The system calls."""


class DiskStore:
    """A `BlockStore` in files of `disk_dir`; see the module and `stores.BlockStore`."""

    def __init__(
        self,
        disk_dir: Path,
        sizes: Mapping[int, int],
        memory: HostMemory,
        *,
        fingerprint: str = "",
        settings: DiskSettings | None = None,
    ) -> None:
        """Reserve space for a record of `sizes[key]` bytes for each key.

        Raises:
            UsageError: the folder is not fit, or holds the generation of another layout.
            StoreError: space could not be reserved.
        """
        self.settings = settings or DiskSettings()
        self.read_bytes = 0
        self.written_bytes = 0
        self._memory = memory
        self._sizes = {key: record_bytes(num_bytes) for key, num_bytes in sizes.items()}
        needed = self.settings.num_slots * sum(self._sizes.values())
        self._folder, self._lock = claim_folder(disk_dir / self.settings.folder, needed)
        self._finalizer = weakref.finalize(
            self, release_folder, self._folder, self._lock, keep_files=self.settings.resume
        )
        try:
            self._generations = Generations(
                self._folder,
                fingerprint=fingerprint,
                names={key: _file_name(key) for key in self._sizes},
                num_slots=self.settings.num_slots,
                io=self.settings.io,
            )
            self._generations.take_up(resume=self.settings.resume)
            self._files = {key: self._new_file(key, size) for key, size in self._sizes.items()}
        except BaseException:
            self._finalizer()
            raise
        largest = max([self.settings.largest_bytes, *self._sizes.values()])
        self._ring = BufferRing(self.settings.num_buffers, record_bytes(largest), memory)
        self._in_ram: dict[int, torch.Tensor] = {}
        self._spare_bytes = self.settings.spare_bytes
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="grpo-lite-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="grpo-lite-write")

    def prefetch(self, keys: Sequence[int]) -> None:
        """Begin to read `keys` as far as there are buffers that hold none of them."""
        for key in keys:
            if key in self._in_ram or self._ring.find(key):
                continue
            buffer = self._ring.free(keep=keys)
            if buffer is None or key not in self._generations.newest:
                return
            self._start_reading(buffer, key)

    def fetch(self, key: int, *, fresh: bool = False) -> torch.Tensor:
        """Lend record `key`, read and verified; an unread or damaged record is read once more."""
        self._collect_failures()
        if key in self._in_ram:
            return self._in_ram[key]
        buffer = self._ring.find(key)
        if buffer is not None and buffer.use is Use.QUEUED:
            self.settle()
        if buffer is None or buffer.use is Use.WRITING:
            buffer = self._wait_for(key, fresh=fresh)
        assert buffer.use is not Use.LENT, f"record {key} is lent already"
        if buffer.use is Use.READING:
            self._finish_reading(buffer, key)
        buffer.use = Use.LENT
        self._ring.touch(buffer)
        return buffer.record(self._sizes[key])

    def put(self, key: int, *, changed: bool = True) -> None:
        """Take record `key` back and begin to write it; it is taken even if this raises.

        The first record of a generation waits for the commit of the last one, whose slots must not
        be touched before.
        """
        if key not in self._in_ram:
            buffer = self._ring.find(key)
            assert buffer is not None, f"record {key} is not lent"
            buffer.use = Use.QUEUED if changed else Use.IDLE
            if self._generations.is_pending:
                self.settle()
            self._start_queued()
        self._collect_failures()

    def status(self, key: int) -> BlockStatus:
        """Return whether record `key` is being written, being read, or lies in its place."""
        buffer = self._ring.find(key)
        if buffer is None or not buffer.is_busy:
            return BlockStatus.STORED
        return BlockStatus.FETCHING if buffer.use is Use.READING else BlockStatus.COPYING

    def add(self, key: int, num_bytes: int) -> None:
        """Reserve a file for record `key`."""
        size = record_bytes(num_bytes)
        assert size <= len(self._ring.buffers[0].memory), "buffers are made for the largest record"
        self._files[key] = self._new_file(key, size)
        self._sizes[key] = size
        self._generations.add(key, _file_name(key))

    def remove(self, key: int) -> None:
        """Remove the file of record `key`; the next commit does not name it."""
        self.settle()
        buffer = self._ring.find(key)
        if buffer is not None:
            buffer.empty()
        self._in_ram.pop(key, None)
        self._generations.remove(key)
        del self._sizes[key]
        file = self._files.pop(key)
        file.close()
        file.path.unlink(missing_ok=True)

    @property
    def meta(self) -> dict[str, Any] | None:
        """What `commit` was given for the generation on disk; None where there is none."""
        return self._generations.meta

    def discard(self) -> None:
        """Give up what could not be written: nobody will read it before it is made anew."""
        for buffer in self._ring.buffers:
            lost = buffer.use is Use.WRITING and not buffer.is_busy and buffer.wait() is not None
            if lost or buffer.use in (Use.FAILED, Use.QUEUED):
                buffer.empty()

    def commit(self, meta: dict[str, Any], *, durable: bool = False) -> None:
        """Make what was put so far a whole generation once it is written; does not wait.

        Records that are put later go to the other slots. `durable` waits for the medium.
        """
        if self._generations.is_pending:
            self.settle()
        if self._in_ram:
            return  # what is in RAM dies with the process: there is no whole generation on disk
        files = self._files if durable else {}
        self._generations.request(meta, files, self._writer)

    def settle(self) -> None:
        """Wait until all that was put is written and committed, trying failed writes again."""
        self._wait_for_writes()
        self._generations.finish(self._writer, give_up=bool(self._in_ram))
        self._start_queued()
        self._wait_for_writes()

    def mapped(self, key: int) -> torch.Tensor:
        """Return record `key` as a tensor over its committed slot: read from disk when touched.

        Verified now; it shows later bytes once the slot is written again, two steps from now.
        """
        self.settle()
        self.fetch(key)
        self.put(key, changed=False)
        if key in self._in_ram:
            return self._in_ram[key]
        size = self._sizes[key]
        slots = self._memory.map_file(self._files[key].path, self.settings.num_slots * size)
        slot = self._generations.newest[key].slot
        return slots[slot * size : (slot + 1) * size]

    def close(self, *, keep_files: bool = False) -> None:
        """Stop the threads and remove the files, unless a later run is to resume from them."""
        if not self._finalizer.alive:
            return
        self._reader.shutdown()
        self._writer.shutdown()
        for file in self._files.values():
            file.close()
        self._ring.buffers = []
        self._in_ram = {}
        self._finalizer.detach()
        release_folder(self._folder, self._lock, keep_files=keep_files)

    def _new_file(self, key: int, size: int) -> BlockFile:
        path = self._folder / _file_name(key)
        return BlockFile(path, self.settings.num_slots * size, self.settings.io)

    # -- buffers ------------------------------------------------------------------------------

    def _wait_for(self, key: int, *, fresh: bool) -> Buffer:
        """Return a buffer that holds or reads `key`, waiting for writes as long as it takes."""
        buffer = self._ring.find(key)
        while buffer is None or buffer.use is Use.WRITING:
            buffer = buffer or self._ring.free()
            if buffer is None:
                buffer = self._oldest_busy()
            if buffer.use is Use.IDLE:
                break
            buffer.wait()
            self._collect_failures()
            buffer = self._ring.find(key)
        if buffer.key == key:
            return buffer
        if fresh:
            buffer.key, buffer.future = key, None
        else:
            self._start_reading(buffer, key)
        return buffer

    def _oldest_busy(self) -> Buffer:
        """Return the buffer whose write began first, or one that was fetched ahead, set free."""
        if self._ring.having(Use.QUEUED):
            self.settle()
        writing = self._ring.having(Use.WRITING)
        if writing:
            return min(writing, key=lambda buffer: buffer.used_at)
        free = self._ring.free()
        if free is not None:
            return free
        reading = self._ring.having(Use.READING)
        assert reading, "every buffer is lent"
        latest = max(reading, key=lambda buffer: buffer.used_at)
        latest.wait()
        latest.empty()
        return latest

    # -- reading ------------------------------------------------------------------------------

    def _start_reading(self, buffer: Buffer, key: int) -> None:
        buffer.key, buffer.use = key, Use.READING
        self._ring.touch(buffer)
        buffer.future = self._reader.submit(self._read, buffer, key)

    def _read(self, buffer: Buffer, key: int) -> None:
        size = self._sizes[key]
        self._files[key].read(_view(buffer.record(size)), self._generations.newest[key].slot * size)
        self.read_bytes += size

    def _finish_reading(self, buffer: Buffer, key: int) -> None:
        """Wait for the read of `buffer`; verify it, and read once more if it failed."""
        error = buffer.wait()
        if error is None and self._is_whole(buffer, key):
            return
        logger.warning("reading record %d again: %s", key, error or "its checksum is wrong")
        try:
            self._reader.submit(self._read, buffer, key).result()
            if not self._is_whole(buffer, key):
                raise StoreError(
                    f"{self._files[key].path} gave back other bytes than were written "
                    f"(slot {self._generations.newest[key].slot}, read twice)",
                    hint="the disk or the file is damaged; go on from a saved state_dict",
                )
        except BaseException:
            buffer.empty()
            raise

    def _is_whole(self, buffer: Buffer, key: int) -> bool:
        return _digest(buffer.record(self._sizes[key])) == self._generations.newest[key].digest

    # -- writing ------------------------------------------------------------------------------

    def _start_queued(self) -> None:
        for buffer in self._ring.having(Use.QUEUED):
            self._start_writing(buffer)

    def _start_writing(self, buffer: Buffer) -> None:
        key = buffer.key
        assert key is not None
        size = self._sizes[key]
        copy = self._generations.begin_copy(key, _digest(buffer.record(size)))
        buffer.use = Use.WRITING
        self._ring.touch(buffer)
        buffer.future = self._writer.submit(self._write, buffer, key, copy.slot * size)

    def _wait_for_writes(self) -> None:
        """Start failed writes again and wait for all, so that an error leaves none on its way."""
        for buffer in self._ring.having(Use.FAILED):
            self._start_writing(buffer)
        for buffer in self._ring.having(Use.WRITING):
            buffer.wait()
        self._note_failures()

    def _write(self, buffer: Buffer, key: int, offset: int) -> None:
        size = self._sizes[key]
        self._files[key].write(_view(buffer.record(size)), offset)
        self.written_bytes += size
        self._generations.end_copy(key)

    def _collect_failures(self) -> None:
        """Start failed writes again, and raise `StoreError` if one has failed since the last call.

        The record of a failed write stays in its buffer.
        """
        for buffer in self._ring.having(Use.FAILED):
            self._start_writing(buffer)
        self._note_failures()

    def _note_failures(self) -> None:
        """Set free what is written; move to spare RAM what a full disk has no room for."""
        first: BaseException | None = None
        for buffer in self._ring.having(Use.WRITING):
            if buffer.is_busy:
                continue
            error = buffer.wait()
            if error is None:
                buffer.use = Use.IDLE
            elif not self._demote(buffer, error):
                buffer.use = Use.FAILED
                first = first or error
        if first is not None:
            raise first

    def _demote(self, buffer: Buffer, error: BaseException) -> bool:
        """Keep the record of `buffer` in spare RAM for good if the disk is full; return whether."""
        capacity = len(buffer.memory)
        full = isinstance(error, OSError) and error.errno in _DISK_FULL
        if not full or self._spare_bytes < capacity or buffer.key is None:
            return False
        self._spare_bytes -= capacity
        self._in_ram[buffer.key] = buffer.record(self._sizes[buffer.key])
        logger.warning(
            "%s: record %d stays in RAM (%s); a killed run cannot be resumed from this folder",
            error,
            buffer.key,
            format_bytes(capacity),
        )
        buffer.memory = self._memory.record(capacity)
        buffer.empty()
        return True


def _file_name(key: int) -> str:
    return f"block-{key:05d}.bin"


def _view(record: torch.Tensor) -> memoryview:
    return record.numpy().data


def _digest(record: torch.Tensor) -> str:
    return str(xxhash.xxh3_64_hexdigest(_view(record)))
