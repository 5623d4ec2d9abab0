"""How much RAM this process may still take: what is free, and what its cgroup allows."""

from __future__ import annotations

from pathlib import Path

import psutil

from grpo_lite.units import GIB

RESERVE_BYTES = 2 * GIB
"""Left free for the rest of the machine where the user names no host budget."""
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or being killed."""
    available = int(psutil.virtual_memory().available)
    for folder, names in _cgroups(root):
        limit, usage = (_number(folder / name) for name in names[:2])
        if limit is not None and usage is not None:
            available = min(available, limit - usage + _cached(folder / "memory.stat", names[2]))
    return max(available, 0)


def _cgroups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders of this process's memory cgroup and its ancestors."""
    mine = root / "proc/self/cgroup"
    if not mine.exists():
        return []
    found = []
    for line in mine.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / "sys/fs/cgroup" / controllers
        names = _V1 if controllers else _V2
        folder = base / path.lstrip("/")
        found += [(part, names) for part in (folder, *folder.parents) if part.is_relative_to(base)]
    return found


def _number(path: Path) -> int | None:
    """Return the number in `path`; None where there is none, or the word "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(path: Path, name: str) -> int:
    """Return the bytes of page cache that count as used and are given up on demand."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
