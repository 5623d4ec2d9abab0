"""Files of the disk tier: checked full-length I/O, the folder that is fit for it, its lock.

`FileIO` makes all system calls on data, so that tests can hand in one that fails.
Knows nothing of buffers, threads or generations (`disk`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

from grpo_lite.errors import StoreError, UsageError
from grpo_lite.offload.placement import PAGE_BYTES
from grpo_lite.units import format_bytes

_MOUNTS = Path("/proc/self/mountinfo")
_REMOTE = ("nfs", "cifs", "smb", "9p", "v9fs", "drvfs", "fuse.sshfs", "ceph", "gluster", "lustre")
_IN_RAM = ("tmpfs", "ramfs")


class FileIO:
    """The system calls that the disk tier makes; each raises `OSError` as `os` does."""

    def open(self, path: Path, flags: int) -> int:
        """Return a file descriptor."""
        return os.open(path, flags, 0o600)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write from `data` at `offset`; return the bytes written, which may be fewer."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Read at `offset` into `into`; return the bytes read, which may be fewer."""
        return os.preadv(fd, [into], offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve disk space for the first `num_bytes` of a file."""
        os.posix_fallocate(fd, 0, num_bytes)

    def fsync(self, fd: int) -> None:
        """Wait until a file's content is on the medium."""
        os.fsync(fd)

    def replace(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target` in one indivisible act."""
        source.replace(target)

    def forget_pages(self, fd: int) -> None:
        """Drop the file's clean pages from the page cache."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class BlockFile:
    """One preallocated file, read and written at whole pages and in full, or `StoreError`."""

    def __init__(self, path: Path, num_bytes: int, io: FileIO) -> None:
        """Open or create `path` with space for `num_bytes`."""
        self.path = path
        self._io = io
        self.is_direct = True
        flags = os.O_RDWR | os.O_CREAT
        try:
            try:
                self.fd = io.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False  # tmpfs of old kernels, some FUSE file systems
                self.fd = io.open(path, flags)
        except OSError as error:
            raise _failed("open", path, 0, error) from error
        self._closer = weakref.finalize(self, os.close, self.fd)
        try:
            io.allocate(self.fd, num_bytes)
        except OSError as error:
            self._closer()
            path.unlink(missing_ok=True)
            raise _failed(f"reserve {format_bytes(num_bytes)} for", path, 0, error) from error

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`."""
        self._transfer("write", self._io.pwrite, data, offset)
        if not self.is_direct:
            self._io.forget_pages(self.fd)

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` from `offset`."""
        self._transfer("read", self._io.preadv, into, offset)

    def _transfer(
        self, verb: str, call: Callable[[int, memoryview, int], int], data: memoryview, offset: int
    ) -> None:
        done = 0
        while done < len(data):
            try:
                count = call(self.fd, data[done:], offset + done)
            except OSError as error:
                if self._leave_direct(error):
                    continue
                raise _failed(verb, self.path, offset + done, error) from error
            if done + count < len(data):  # go on from a whole page, as direct I/O must
                count -= count % PAGE_BYTES
            if count <= 0:
                raise _short(verb, self.path, offset + done, len(data) - done)
            done += count

    def close(self) -> None:
        """Close the file; it stays where it is."""
        self._closer()

    def sync(self) -> None:
        """Wait until the content is on the medium."""
        try:
            self._io.fsync(self.fd)
        except OSError as error:
            raise _failed("sync", self.path, 0, error) from error

    def _leave_direct(self, error: OSError) -> bool:
        """Go on buffered if `error` says that direct I/O was allowed but does not work."""
        if error.errno != errno.EINVAL or not self.is_direct:
            return False
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False
        return True


def claim_folder(folder: Path, needed_bytes: int) -> tuple[Path, int]:
    """Make `folder` ours and return it with the descriptor of its lock, held until it is closed.

    Raises:
        UsageError: the folder is missing, read-only, remote, in RAM, too small or in use.
    """
    disk_dir = folder.parent
    if not disk_dir.is_dir():
        raise UsageError(f"disk_dir {disk_dir} is not a folder", hint=f"mkdir -p {disk_dir}")
    _require_local(disk_dir)
    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UsageError(
            f"disk_dir {disk_dir} cannot be written: {error.strerror}",
            hint="give a folder of your own on a local disk",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise UsageError(
            f"{folder} is in use by process {owner or 'unknown'}",
            hint="give each run a disk_dir of its own",
        ) from error
    os.truncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    held = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    free = shutil.disk_usage(folder).free + held
    if free < needed_bytes:
        os.close(lock)
        raise UsageError(
            f"the disk tier needs {format_bytes(needed_bytes)}; "
            f"{disk_dir} has {format_bytes(free)} free",
            hint="give disk_dir on a larger disk, or more host_bytes",
        )
    return folder, lock


def remove_files(folder: Path, *, keep: frozenset[str] = frozenset()) -> int:
    """Remove our files of `folder` except those named in `keep`; return how many bytes that frees.

    Only our own names are touched, and never the lock.
    """
    freed = 0
    for pattern in ("*.bin", "manifest.json*"):
        for path in folder.glob(pattern):
            if path.name not in keep:
                freed += path.stat().st_blocks * 512
                path.unlink(missing_ok=True)
    return freed


def release_folder(folder: Path, lock: int, *, keep_files: bool) -> None:
    """Let go of the lock of `folder`, and remove it with all that is ours in it unless kept."""
    if not keep_files:
        with contextlib.suppress(OSError):  # already gone, or somebody put a file of theirs there
            remove_files(folder)
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()
    os.close(lock)


def file_system_of(path: Path) -> str:
    """Return the type of the file system of `path` ("ext4"), "" where the system does not say."""
    if not _MOUNTS.exists():
        return ""
    best, kind = -1, ""
    for line in _MOUNTS.read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        mount = Path(fields.split()[4].replace("\\040", " "))
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), tail.split()[0]
    return kind


def _require_local(disk_dir: Path) -> None:
    kind = file_system_of(disk_dir)
    if kind.startswith(_REMOTE):
        advice = "9p" if kind in ("9p", "drvfs", "v9fs") else "a network share"
        raise UsageError(
            f"disk_dir {disk_dir} is on {kind} ({advice}): too slow, and a write may be lost",
            hint="use a folder of a local disk; in WSL2 one below your Linux home, not /mnt/c",
        )
    if kind in _IN_RAM:
        raise UsageError(
            f"disk_dir {disk_dir} is on {kind}, which is RAM",
            hint="raise host_bytes instead, or give a folder on a real disk",
        )


def _failed(verb: str, path: Path, offset: int, error: OSError) -> StoreError:
    failure = StoreError(
        f"cannot {verb} {path} at byte {offset}: {error.strerror} (errno {error.errno})",
        hint="free space on the disk or give another disk_dir"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "check the disk (dmesg); the step can be called again to go on",
    )
    failure.errno = error.errno
    return failure


def _short(verb: str, path: Path, offset: int, missing: int) -> StoreError:
    return StoreError(
        f"the {verb} of {path} stopped at byte {offset}, {missing} bytes short",
        hint="check the disk (dmesg); the step can be called again to go on",
    )
