"""Which slot of which record belongs to the generation on disk, and the act that makes the next.

Knows slots and checksums; the records themselves pass through `disk`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lite.errors import StoreError, UsageError
from grpo_lite.offload.disk_files import BlockFile, FileIO, remove_files
from grpo_lite.offload.manifest import NAME, Copy, Manifest, read_manifest, write_manifest
from grpo_lite.units import format_bytes

logger = logging.getLogger(__name__)


class Generations:
    """The generation that the manifest names, and the one that is being written.

    Called by the owner's thread, except `end_copy`, which the writer thread calls.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        names: Mapping[int, str],
        num_slots: int,
        io: FileIO,
    ) -> None:
        """`names` are the file names by record key."""
        self.meta: dict[str, Any] | None = None
        """What the generation on disk was committed with; None: there is none."""
        self.newest: dict[int, Copy] = {}
        """The copy of each record that was written, or began to be written, last."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._names = dict(names)
        self._num_slots = num_slots
        self._io = io
        self._committed: dict[int, Copy] = {}
        self._unwritten: set[int] = set()
        self._pending: _Pending | None = None
        self._result: Future[None] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a commit was asked for and not yet confirmed."""
        return self._pending is not None

    def take_up(self, *, resume: bool) -> None:
        """Read the manifest if this run resumes; remove the files that belong to nobody.

        Raises:
            UsageError: the files belong to another layout.
            StoreError: the manifest cannot be read or names files that are missing.
        """
        manifest = read_manifest(self._folder) if resume else None
        if manifest is None:
            freed = remove_files(self._folder)
            if freed:
                logger.warning(
                    "removed %s that an earlier run left in %s", format_bytes(freed), self._folder
                )
            return
        if manifest.fingerprint != self._fingerprint or set(manifest.copies) != set(self._names):
            raise UsageError(
                f"{self._folder} holds the optimizer state of another model, block size or "
                f"placement ({len(manifest.copies)} records where this run has {len(self._names)})",
                hint="give another disk_dir, or resume=False to start anew there",
            )
        names = frozenset(self._names.values()) | {NAME}
        remove_files(self._folder, keep=names)
        missing = [name for name in sorted(names) if not (self._folder / name).exists()]
        if missing:
            raise StoreError(
                f"{self._folder} lacks {', '.join(missing[:3])} ({len(missing)} of {len(names)})",
                hint="resume=False starts anew; load a saved state_dict after that",
            )
        self.meta = manifest.meta
        self._committed = dict(manifest.copies)
        self.newest = dict(manifest.copies)

    def add(self, key: int, name: str) -> None:
        """Take a new record into the next generation."""
        self._names[key] = name

    def remove(self, key: int) -> None:
        """Leave record `key` out of the next generation."""
        del self._names[key]
        self.newest.pop(key, None)
        self._committed.pop(key, None)
        self._unwritten.discard(key)

    def begin_copy(self, key: int, digest: str) -> Copy:
        """Return where to write record `key`: the slot that the generation on disk does not use."""
        slot = 0
        if key in self._committed:
            slot = (self._committed[key].slot + 1) % self._num_slots
        self._unwritten.add(key)
        self.newest[key] = Copy(slot=slot, digest=digest)
        return self.newest[key]

    def end_copy(self, key: int) -> None:
        """Record that the copy of `key` is whole."""
        self._unwritten.discard(key)

    def request(
        self, meta: dict[str, Any], sync: Mapping[int, BlockFile], writer: Executor
    ) -> None:
        """Ask `writer` to commit all copies begun so far, after syncing the files in `sync`."""
        assert self._pending is None, "the last commit is not confirmed"
        manifest = Manifest(fingerprint=self._fingerprint, meta=meta, copies=dict(self.newest))
        self._pending = _Pending(manifest=manifest, sync=sync)
        self._result = writer.submit(self._commit, self._pending)

    def finish(self, writer: Executor, *, give_up: bool) -> None:
        """Wait for the commit that was asked for, and ask again if it failed.

        `give_up`: drop it, since a record has left the disk for good.

        Raises:
            StoreError: the manifest could not be replaced; the old one is in its place.
        """
        if self._pending is None:
            return
        assert self._result is not None
        if self._result.exception() is not None:
            if give_up:
                self._pending = None
                return
            self._result = writer.submit(self._commit, self._pending)
        try:
            self._result.result()
        except OSError as error:
            raise StoreError(
                f"cannot replace the manifest in {self._folder}: {error.strerror or error}",
                hint="free space on the disk; the step can be called again to go on",
            ) from error
        self._committed = dict(self._pending.manifest.copies)
        self.meta = self._pending.manifest.meta
        self._pending = None

    def _commit(self, pending: _Pending) -> None:
        """Replace the manifest; runs in the writer thread, so after the writes before it."""
        if self._unwritten:
            raise StoreError("records of this generation are not written yet")
        for file in pending.sync.values():
            file.sync()
        write_manifest(self._folder, pending.manifest, self._io, durable=bool(pending.sync))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A commit that was asked for."""

    manifest: Manifest
    """What it will name."""
    sync: Mapping[int, BlockFile]
    """Files to be synced before; empty: surviving the process is enough."""
