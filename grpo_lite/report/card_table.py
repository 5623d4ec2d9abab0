"""A card's profile for people: every figure with its spread, its source and its evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_lite.cards.profile import CardProfile, Figure
from grpo_lite.units import format_bytes

_WORDS = {
    "total_bytes": "memory",
    "runtime_bytes": "context of one process",
    "cublas_workspace_bytes": "cuBLAS workspace, each",
    "held_by_others_bytes": "held by others",
    "memory_bandwidth_bytes_per_s": "memory bandwidth",
    "launch_s": "start of one operation",
    "link_bytes_per_s": "link to card, pinned",
    "link_to_host_bytes_per_s": "link to host, pinned",
    "pageable_link_bytes_per_s": "link to card, pageable",
    "pinnable_bytes": "can be page-locked",
    "driver_total_bytes": "memory (driver)",
    "windows_total_bytes": "memory (Windows)",
    "windows_held_by_others_bytes": "held by others (Windows)",
    "host_ram_bytes": "RAM of the machine",
    "host_bandwidth_bytes_per_s": "bandwidth of that RAM",
    "disk_write_bytes_per_s": "disk, writing",
    "disk_read_bytes_per_s": "disk, reading",
    "tdp_w": "power limit",
}


def profile_screen(profile: CardProfile) -> RenderableType:
    """Return `profile` as a table of its figures."""
    title = Text.assemble((profile.name, "bold"), f"  {profile.title}")
    facts = [profile.arch, profile.chip, profile.pcie]
    if profile.compute_capability:
        facts.append(f"compute capability {profile.compute_capability}")
    facts.append("bfloat16" if profile.supports_bfloat16 else "no fast bfloat16")
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify)
    for word, figure, unit in _figures(profile):
        value, spread = _shown(figure, unit)
        style = "green" if figure.source == "measured" else "dim"
        table.add_row(
            Text(word),
            Text(value, style="bold"),
            Text(spread),
            Text(figure.source, style=style),
        )
    return Group(title, Text(", ".join(fact for fact in facts if fact)), table)


def _figures(profile: CardProfile) -> Iterator[tuple[str, Figure, str]]:
    for field in fields(profile):
        value = getattr(profile, field.name)
        if isinstance(value, Figure):
            yield _WORDS[field.name], value, _unit(field.name)
    for dtype, figure in profile.flops_per_s.items():
        yield f"matrix products, {dtype}", figure, "flops"


def _unit(name: str) -> str:
    return next(unit for unit in ("bytes_per_s", "bytes", "_s", "_w") if name.endswith(unit))


def _shown(figure: Figure, unit: str) -> tuple[str, str]:
    """Return the value with its unit, and the spread in the same unit."""
    values = [figure.value, figure.low, figure.high]
    if unit == "bytes":
        texts = [None if value is None else format_bytes(value) for value in values]
        word = ""
    else:
        scale, word = _scale(figure.value, unit)
        texts = [None if value is None else f"{value / scale:.3g}" for value in values]
    value, low, high = texts
    assert value is not None
    spread = "" if low is None or high is None else f"{low} .. {high}"
    return f"{value} {word}".strip(), spread


def _scale(value: float, unit: str) -> tuple[float, str]:
    if unit == "_w":
        return 1, "W"
    if unit == "_s":
        return 1e-6, "us"
    word = "FLOP/s" if unit == "flops" else "B/s"
    for scale, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= scale:
            return scale, f"{prefix}{word}"
    return 1e6, f"M{word}"
