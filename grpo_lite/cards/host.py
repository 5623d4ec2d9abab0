"""What the host's processor and memory can do.

Reads the operating system; knows no torch.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})


def gains_from_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies in bfloat16; without, it is slower than float32."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def available_host_bytes() -> int:
    """Return the RAM that can be taken now without swapping."""
    return int(psutil.virtual_memory().available)
