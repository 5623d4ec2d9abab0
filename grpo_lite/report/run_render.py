"""The report on a run as text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from grpo_lite.report import page
from grpo_lite.report.charts import curves_chart, seconds_chart
from grpo_lite.report.markdown import escape as escape_markdown
from grpo_lite.report.markdown import markdown_table
from grpo_lite.report.run_report import (
    RunReport,
    decision_rows,
    held_out_rows,
    phase_rows,
    run_sentence,
)
from grpo_lite.units import GIB, format_bytes, format_seconds

PHASE_HEADS = ("phase", "predicted peak", "measured peak", "error", "mean time")
DECISION_HEADS = ("update", "phase", "change", "why")
HELD_OUT_HEADS = ("after update", "held-out reward")
MEMORY_CAPTION = (
    "Allocated bytes at each update's worst moment; predictions are for the shapes that ran. The "
    "level line is the budget, a dashed line a decision of the governor. Below: each phase's "
    "largest."
)


def run_to_text(report: RunReport) -> str:
    """Return `report` as plain lines, the answer first, ending in a newline."""
    lines = [run_sentence(report), "", *_aligned((PHASE_HEADS, *phase_rows(report)))]
    if report.held_out:
        lines += ["", *_aligned((HELD_OUT_HEADS, *held_out_rows(report)))]
    lines.append("")
    for step, phase, change, reason in decision_rows(report):
        lines += [f"governor: update {step}, {phase}: {change}", f"  {reason}"]
    if not report.decisions:
        lines.append("governor: nothing to do")
    return "\n".join(lines) + "\n"


def run_to_markdown(report: RunReport) -> str:
    """Return `report` as Markdown, ending in a newline."""
    parts = [
        f"# {escape_markdown(run_sentence(report))}",
        "## By phase",
        markdown_table(PHASE_HEADS, phase_rows(report)),
    ]
    if report.held_out:
        parts += ["## Held out", markdown_table(HELD_OUT_HEADS, held_out_rows(report))]
    parts.append("## The governor")
    decisions = decision_rows(report)
    parts.append(markdown_table(DECISION_HEADS, decisions) if decisions else "Nothing to do.")
    return "\n\n".join(parts) + "\n"


def run_to_html(report: RunReport) -> str:
    """Return `report` as a self-contained HTML page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    return page.page(f"{report.model} on {report.card}: the run", _html_parts(report))


RUN_RENDERERS: dict[str, Callable[[RunReport], str]] = {
    "text": run_to_text,
    "markdown": run_to_markdown,
    "html": run_to_html,
}
"""The formats, by name."""


def _html_parts(report: RunReport) -> Iterator[str]:
    curves, steps = report.curves, report.steps
    marks = [int(decision["step"]) for decision in report.decisions if "step" in decision]
    tokens = [value for value in curves["tokens_per_s"] if value is not None]
    yield "\n".join(
        (
            "<header>",
            page.heading(run_sentence(report)),
            page.facts(
                (
                    ("updates", f"{len(steps):,}"),
                    ("time of all updates", format_seconds(report.seconds)),
                    ("tokens/s", f"{sum(tokens) / max(1, len(tokens)):,.0f}"),
                    ("peak", format_bytes(report.peak_bytes)),
                    ("governor's decisions", str(len(marks))),
                )
            ),
            "</header>",
        )
    )
    reward = curves_chart(
        "reward", steps, {"reward": curves["reward"]}, marks=marks, from_zero=False
    )
    yield page.section(
        "Reward",
        page.figure(reward, "Mean reward of the sampled completions of each update."),
        page.table(HELD_OUT_HEADS, held_out_rows(report)) if report.held_out else "",
    )
    lengths = {"mean completion tokens": curves["mean_completion_tokens"]}
    shares = {
        "cut off at the cap": curves["truncated_fraction"],
        "dead groups": curves["dead_group_fraction"],
    }
    yield page.section(
        "Lengths",
        page.figure(curves_chart("lengths", steps, lengths, marks=marks), "Without padding."),
        page.figure(
            curves_chart("shares", steps, shares, marks=marks),
            "Shares: completions that reached the length cap, and groups whose rewards are all "
            "equal, so that they teach nothing.",
        ),
    )
    yield _memory(report, marks)
    timed = [(part.phase, part.seconds, "") for part in report.phases if part.seconds]
    yield page.section(
        "Time by phase", page.figure(seconds_chart(timed), "Mean of an update, measured.")
    )
    decisions = decision_rows(report)
    yield page.section(
        "The governor",
        page.table(DECISION_HEADS, decisions) if decisions else page.paragraph("Nothing to do."),
    )
    yield "<footer>grpo-lite; what is not called predicted is measured</footer>"


def _memory(report: RunReport, marks: Sequence[int]) -> str:
    peaks = {
        label: [None if size is None else size / GIB for size in report.curves[name]]
        for label, name in (
            ("measured peak, GiB", "peak_bytes"),
            ("predicted", "predicted_peak_bytes"),
        )
    }
    chart = curves_chart(
        "peaks",
        report.steps,
        peaks,
        marks=marks,
        limit=None if report.budget_bytes is None else report.budget_bytes / GIB,
    )
    rows = phase_rows(report)
    return page.section(
        "Memory, predicted and measured",
        page.figure(chart, MEMORY_CAPTION),
        page.table(PHASE_HEADS, rows, numbers=(1, 2, 3, 4)),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
