"""The auto-tune report as Markdown: for issues, chats and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from grpo_lite.report.document import Document
from grpo_lite.report.sentences import (
    answer_sentence,
    batch_sentence,
    budget_sentence,
    rehearsal_rows,
    trl_code,
)
from grpo_lite.report.words import CATEGORY_WORDS, largest_at_peak
from grpo_lite.search import Verdict
from grpo_lite.units import format_bytes, format_seconds

MAX_TENSORS = 6
"""Rows of the table of the largest tensors."""


def document_to_markdown(document: Document) -> str:
    """Return `document` as Markdown, ending in a newline."""
    return "\n\n".join(_parts(document)) + "\n"


def _parts(document: Document) -> Iterator[str]:
    fits = document.verdict is not Verdict.DOES_NOT_FIT
    yield f"# {document.verdict.upper()}: {escape(answer_sentence(document))}"
    yield f"{escape(document.card_title)}: {budget_sentence(document)}."
    if not fits and document.alternatives:
        yield from _alternatives(document, "What would fit")
    yield "## By phase (predicted, at the length caps)"
    yield _phases(document)
    if document.rehearsal is not None:
        yield "Rehearsed at full depth: " + ", ".join(
            f"{phase} {format_bytes(size)} ({error:+.1%})"
            for phase, size, error in rehearsal_rows(document)
        )
    yield f"## What fills the peak: {escape(document.chosen.memory.peak.where)}"
    yield markdown_table(
        ("bytes", "size", "held for"),
        (
            (format_bytes(tensor.num_bytes), tensor.arithmetic, tensor.what)
            for tensor in largest_at_peak(document)[:MAX_TENSORS]
        ),
    )
    yield "## Settings, and why" if fits else "## The nearest to fitting"
    yield markdown_table(
        ("setting", "value", "why not the next one"),
        ((choice.setting, choice.value, choice.reason) for choice in document.choices),
    )
    yield batch_sentence(document)
    if fits and document.alternatives:
        yield from _alternatives(document, "Next best")
    if fits and document.recipe_text is not None:
        yield "## Recipe"
        yield f"```toml\n{document.recipe_text.strip()}\n```"
    if fits and document.trl_arguments:
        yield "## The same in TRL"
        yield f"```python\n{trl_code(document, width=88)}\n```"
    if document.assumptions:
        yield "## What the numbers rest on"
        yield "\n".join(f"- {escape(text)}" for text in document.assumptions)


def _phases(document: Document) -> str:
    memory = document.chosen.memory
    speeds = {part.phase: part for part in document.chosen.speed.phases}
    rows = []
    for estimate in memory.phases:
        timed = speeds.get(estimate.phase)
        parts = (
            f"{word} {format_bytes(estimate.by_category[category])}"
            for category, word in CATEGORY_WORDS.items()
            if estimate.by_category.get(category)
        )
        rows.append(
            (
                f"**{estimate.phase}**" if estimate is memory.peak else estimate.phase.value,
                format_bytes(estimate.allocated_bytes),
                ", ".join(parts),
                format_seconds(timed.seconds) if timed else "",
                timed.bound_by if timed else "",
            )
        )
    return markdown_table(("phase", "peak", "of which", "time", "bound by"), rows, raw=True)


def _alternatives(document: Document, title: str) -> Iterator[str]:
    yield f"## {title}"
    yield markdown_table(
        ("what", "peak", "an update", "verdict", "flags"),
        (
            (
                f"{other.description}{' (another experiment)' if other.changes_experiment else ''}",
                format_bytes(other.peak_bytes),
                format_seconds(other.seconds),
                other.verdict,
                other.flags,
            )
            for other in document.alternatives
        ),
    )


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, raw: bool = False
) -> str:
    """Return a Markdown table; cells are escaped unless they are `raw` Markdown."""
    lines = [heads, ["---"] * len(heads)]
    lines.extend([cell if raw else escape(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: str) -> str:
    """Return `text` so that Markdown shows it as it is."""
    for character in ("\\", "|", "*", "_", "`", "<", "["):
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")
