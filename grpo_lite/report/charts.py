"""The charts of a report as static SVG, drawn by matplotlib.

Colours are placeholders that the page's style sheet fills, so that one chart serves dark and light.
Needs the extra `report`; says so where it is missing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_lite.errors import UsageError
from grpo_lite.plan import Category, Phase
from grpo_lite.report.words import CATEGORY_WORDS
from grpo_lite.units import GIB, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 8.2
"""Width of every chart; the page scales it to its own."""
ROW_IN = 0.34
"""Height of a bar with its gap."""
INK, FAINT, GOOD, BAD = "#010101", "#020202", "#030303", "#040404"
"""Placeholders for text and axes, grid, what is chosen, and the budget."""
_PLACEHOLDERS = {INK: "ink", FAINT: "line", GOOD: "good", BAD: "bad"}
_CATEGORY_COLOURS = {category: f"#0501{index:02x}" for index, category in enumerate(CATEGORY_WORDS)}
_VARIABLES = {
    **_PLACEHOLDERS,
    **{colour: f"{category.value}" for category, colour in _CATEGORY_COLOURS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One plan in a plot of time against memory."""

    peak_bytes: int
    """Predicted peak."""
    seconds: float
    """Predicted seconds of an update."""
    label: str
    """What is written beside it; empty for nothing."""
    is_chosen: bool = False
    """Whether it is the answer."""


def memory_chart(by_phase: Mapping[Phase, Mapping[Category, int]], budget_bytes: int) -> str:
    """Return stacked bars of bytes by phase and category against the budget, as SVG."""
    with _figure(1.15 + ROW_IN * len(by_phase), "memory") as (figure, axes, out):
        phases = list(by_phase)
        left = [0.0] * len(phases)
        for category, word in CATEGORY_WORDS.items():
            sizes = [by_phase[phase].get(category, 0) / GIB for phase in phases]
            if any(sizes):
                colour = _CATEGORY_COLOURS[category]
                axes.barh(_names(phases), sizes, left=left, color=colour, height=0.72, label=word)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        budget_gib = budget_bytes / GIB
        axes.axvline(budget_gib, color=BAD, linewidth=2)
        axes.set_xlim(0, max(1.02 * budget_gib, 1.1 * max(left)))
        for row, total in enumerate(left):
            axes.annotate(
                f"{total:.3g}",
                (total, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=INK,
            )
        axes.invert_yaxis()
        axes.set_xlabel(
            f"GiB at each phase's worst moment; the line is the budget, {budget_gib:.3g} GiB"
        )
        _legend(figure, axes)
    return out[0]


def seconds_chart(seconds: Sequence[tuple[Phase, float, str]]) -> str:
    """Return bars of (phase, seconds, what bounds it), as SVG."""
    with _figure(0.75 + ROW_IN * len(seconds), "seconds") as (_, axes, out):
        values = [value for _, value, _ in seconds]
        axes.barh(_names([phase for phase, _, _ in seconds]), values, color=GOOD, height=0.72)
        axes.set_xlim(0, max(values) * 1.35)
        for row, (_, value, bound) in enumerate(seconds):
            text = ", ".join(part for part in (format_seconds(value), bound) if part)
            axes.annotate(
                text,
                (value, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=INK,
            )
        axes.invert_yaxis()
        axes.set_xlabel("seconds of one update")
    return out[0]


def tradeoff_chart(points: Sequence[Point], budget_bytes: int) -> str:
    """Return plans as points, seconds against memory, as SVG."""
    with _figure(3.6, "tradeoff") as (_, axes, out):
        line = sorted((point.peak_bytes / GIB, point.seconds) for point in points)
        axes.plot(*zip(*line, strict=True), color=FAINT, linewidth=1.5, drawstyle="steps-post")
        for point in points:
            place = (point.peak_bytes / GIB, point.seconds)
            size = 90 if point.is_chosen else 34
            axes.scatter(*place, s=size, color=GOOD if point.is_chosen else INK, zorder=3)
            if point.label:
                axes.annotate(
                    point.label, place, xytext=(7, 5), textcoords="offset points", color=INK
                )
        axes.axvline(budget_bytes / GIB, color=BAD, linewidth=2)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high + 0.16 * (high - low))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("peak in GiB (the line is the budget)")
        axes.set_ylabel("seconds of an update")
    return out[0]


def curves_chart(
    name: str,
    steps: Sequence[int],
    curves: Mapping[str, Sequence[float | None]],
    *,
    marks: Sequence[int] = (),
    limit: float | None = None,
    from_zero: bool = True,
) -> str:
    """Return `curves` over the updates `steps`, with a line at each of `marks`, as SVG.

    `limit` is a level not to be crossed; `from_zero` starts the scale at 0, so that small changes
    look small.
    """
    colours = (GOOD, INK, _CATEGORY_COLOURS[Category.ACTIVATION])
    with _figure(2.5, name) as (figure, axes, out):
        for (label, values), colour in zip(curves.items(), colours, strict=False):
            known = [float("nan") if value is None else value for value in values]
            marker = "o" if len(steps) < 3 else None
            axes.plot(steps, known, color=colour, linewidth=1.8, label=label, marker=marker)
        for step in marks:
            axes.axvline(step, color=BAD, linewidth=1.2, linestyle="--")
        if limit is not None:
            axes.axhline(limit, color=BAD, linewidth=2)
        if from_zero:
            axes.set_ylim(bottom=0)
            axes.margins(y=0.1)
        axes.set_xlabel("update")
        axes.locator_params(axis="x", integer=True)
        _legend(figure, axes)
    return out[0]


def _names(phases: Sequence[Phase]) -> list[str]:
    return [phase.value for phase in phases]


@contextmanager
def _figure(height_in: float, name: str) -> Iterator[tuple[Figure, Axes, list[str]]]:
    """Yield an empty figure, its axes, and a list that holds the SVG afterwards."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise UsageError(
            "HTML reports need matplotlib, which is not installed",
            hint="pip install 'grpo-lite[report]', or --format markdown",
        ) from error
    style: dict[str, Any] = {
        "svg.fonttype": "none",  # text stays text: it can be selected, searched and read aloud
        "svg.hashsalt": name,  # ids are the same every time
        "font.size": 10,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": FAINT,
    }
    out: list[str] = []
    with mpl.rc_context(style):
        figure = NewFigure(figsize=(WIDTH_IN, height_in), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.grid(visible=True, axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        yield figure, axes, out
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    out.append(_for_page(buffer.getvalue(), name))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(loc="outside upper left", ncols=min(4, max(1, len(handles))), frameon=False)


def _for_page(svg: str, name: str) -> str:
    """Return `svg` without its file header, its ids its own, its colours the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: _variable(found.group()), svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1).strip()


def _variable(colour: str) -> str:
    return f"var(--{_VARIABLES[colour]})" if colour in _VARIABLES else colour
