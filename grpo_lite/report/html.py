"""The auto-tune report as one HTML file to keep or to send."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_lite.report import page
from grpo_lite.report.charts import Point, memory_chart, seconds_chart, tradeoff_chart
from grpo_lite.report.document import Document
from grpo_lite.report.sentences import (
    answer_sentence,
    batch_sentence,
    budget_sentence,
    rehearsal_rows,
    trl_code,
)
from grpo_lite.report.words import largest_at_peak
from grpo_lite.search import Verdict
from grpo_lite.units import format_bytes, format_seconds

MAX_TENSORS = 8
"""Rows of the table of the largest tensors."""

SAME_POINT_FRACTION = 0.01
"""Plans nearer than this to the chosen one's bytes would be drawn under it."""


def document_to_html(document: Document) -> str:
    """Return `document` as a self-contained HTML page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    return page.page(f"{document.model} on {document.card}", _parts(document))


def _parts(document: Document) -> Iterator[str]:
    fits = document.verdict is not Verdict.DOES_NOT_FIT
    yield _head(document)
    if not fits:
        yield _alternatives(document, "What would fit")
    yield _memory(document)
    yield _largest(document)
    yield _seconds(document)
    yield _choices(document)
    if fits:
        yield _tradeoff(document)
        yield _to_take_away(document)
    yield page.section("What the numbers rest on", page.bullets(document.assumptions))
    yield (
        f"<footer>grpo-lite, {document.num_candidates:,} plans priced in "
        f"{format_seconds(document.seconds)}; bytes and seconds are predictions "
        "unless they are called measured</footer>"
    )


def _head(document: Document) -> str:
    chosen, budget_bytes = document.chosen, document.budget.card_bytes
    peak_bytes = chosen.memory.allocated_peak_bytes
    kind = document.verdict.replace(" ", "-")
    return "\n".join(
        (
            f'<header>\n<span class="verdict {kind}">{document.verdict.upper()}</span>',
            page.heading(answer_sentence(document)),
            page.paragraph(document.model_note, soft=True),
            page.facts(
                (
                    ("peak", format_bytes(peak_bytes)),
                    ("of the budget", f"{peak_bytes / budget_bytes:.0%}"),
                    ("an update", format_seconds(chosen.speed.seconds)),
                    ("completion tokens/s", f"{chosen.speed.tokens_per_s:,.0f}"),
                )
            ),
            page.paragraph(f"{document.card_title}: {budget_sentence(document)}"),
            page.paragraph(document.card_note, soft=True),
            "</header>",
        )
    )


def _memory(document: Document) -> str:
    memory = document.chosen.memory
    chart = memory_chart(
        {phase.phase: phase.by_category for phase in memory.phases}, document.budget.card_bytes
    )
    rehearsed = ""
    if document.rehearsal is not None:
        rehearsed = page.paragraph(
            f"Rehearsed at full depth on fake tensors in "
            f"{format_seconds(document.rehearsal.seconds)}: "
            + ", ".join(
                f"{phase} {format_bytes(size)} ({error:+.1%})"
                for phase, size, error in rehearsal_rows(document)
            )
            + " (error of the prediction).",
            soft=True,
        )
    caption = (
        f"The largest is {memory.peak.phase} ({memory.peak.where}). A run needs the largest bar, "
        "not their sum: phases come one after the other."
    )
    return page.section("Memory by phase", page.figure(chart, caption), rehearsed)


def _largest(document: Document) -> str:
    rows = [
        (format_bytes(tensor.num_bytes), tensor.arithmetic, tensor.what)
        for tensor in largest_at_peak(document)[:MAX_TENSORS]
    ]
    title = f"What fills the peak: {document.chosen.memory.peak.where}"
    return page.section(title, page.table(("bytes", "size", "held for"), rows, numbers=(0,)))


def _seconds(document: Document) -> str:
    speed = document.chosen.speed
    chart = seconds_chart([(part.phase, part.seconds, part.bound_by) for part in speed.phases])
    caption = f"{format_seconds(speed.seconds)} in all, without the reward functions."
    return page.section("Time by phase", page.figure(chart, caption))


def _choices(document: Document) -> str:
    rows = [(choice.setting, choice.value, choice.reason) for choice in document.choices]
    fits = document.verdict is not Verdict.DOES_NOT_FIT
    return page.section(
        "Settings, and why" if fits else "The nearest to fitting",
        page.table(("setting", "value", "why not the next one"), rows),
        page.paragraph(batch_sentence(document), soft=True),
    )


def _alternatives(document: Document, title: str) -> str:
    rows = [
        (
            f"{other.description}{' *' if other.changes_experiment else ''}",
            format_bytes(other.peak_bytes),
            format_seconds(other.seconds),
            other.verdict,
            other.flags,
        )
        for other in document.alternatives
    ]
    if not rows:
        return ""
    starred = any(other.changes_experiment for other in document.alternatives)
    note = page.paragraph("* is another experiment.", soft=True) if starred else ""
    heads = ("what", "peak", "an update", "verdict", "flags")
    return page.section(title, page.table(heads, rows, numbers=(1, 2)), note)


def _tradeoff(document: Document) -> str:
    chosen = document.chosen
    chosen_bytes = chosen.memory.allocated_peak_bytes
    others = [
        other
        for other in document.frontier
        if abs(other.peak_bytes / chosen_bytes - 1) > SAME_POINT_FRACTION
    ]
    points = [
        Point(
            peak_bytes=other.peak_bytes,
            seconds=other.seconds,
            label=other.description if other in (others[0], others[-1]) else "",
        )
        for other in others
    ]
    points.append(
        Point(
            peak_bytes=chosen_bytes,
            seconds=chosen.speed.seconds,
            label="chosen",
            is_chosen=True,
        )
    )
    chart = ""
    if len(points) > 1:
        caption = (
            "Plans of the same experiment that no other beats in both memory and time. "
            "Further left costs time; right of the line does not fit."
        )
        chart = page.figure(tradeoff_chart(points, document.budget.card_bytes), caption)
    return "\n".join(
        part
        for part in (
            page.section("Memory against time", chart),
            _alternatives(document, "Next best"),
        )
        if part
    )


def _to_take_away(document: Document) -> str:
    parts = []
    if document.recipe_text is not None:
        parts.append(page.paragraph("recipe.toml, for `grpo-lite train recipe.toml`:"))
        parts.append(page.code(document.recipe_text, name="recipe"))
    if document.trl_arguments:
        parts.append(page.paragraph("The same in TRL:"))
        parts.append(page.code(trl_code(document, width=88), name="trl"))
    return page.section("To take away", *parts)
