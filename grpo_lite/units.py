"""Bytes and seconds as people write and read them.

Knows the two families of byte units (GiB is 2**30, GB is 10**9) and nothing else.
Inside the program every size is an int of bytes and every time a float of seconds.
"""

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` names: "6.5GiB" (2**30), "8GB" (10**9), "512" (bytes).

    Raises:
        ValueError: the text is not a number followed by a known unit, or more than 2**63 bytes.
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNIT_BYTES:
        raise ValueError(
            f"{text!r} is not a size; write a number and a unit, as in 6.5GiB or 800MiB"
        )
    size = float(match.group(1)) * _UNIT_BYTES[unit]
    if size >= 2**63:
        raise ValueError(f"{text[:40]!r} is more bytes than any machine can count")
    return round(size)


def format_bytes(num_bytes: int | float) -> str:
    """Return `num_bytes` as text in binary units with three significant digits: "2.41 GiB"."""
    size = float(num_bytes)
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size) >= unit_bytes:
            return f"{_three_digits(size / unit_bytes)} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: "0.24 s", "12.3 s", "4 min 05 s", "2 h 10 min"."""
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
