"""The auto-tune report as a screen for people: the answer first, then what it rests on.

Adds layout and nothing else; letters carry what colour also says, so that it reads without colour.
Every text is a `Text`, since names of models and tensors may hold square brackets.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_lite.plan import Category
from grpo_lite.predict.memory import PhaseEstimate
from grpo_lite.report.document import Alternative, Document
from grpo_lite.report.words import CATEGORY_WORDS, largest_at_peak, method_in_words
from grpo_lite.search import Verdict
from grpo_lite.units import format_bytes, format_seconds

MAX_TENSORS = 4
"""Rows of the list of the largest tensors."""

_CATEGORIES = {
    Category.PARAMETER: ("W", "white on blue"),
    Category.GRADIENT: ("G", "black on green"),
    Category.OPTIMIZER_STATE: ("O", "black on yellow"),
    Category.ACTIVATION: ("A", "black on cyan"),
    Category.LOGITS: ("L", "white on red"),
    Category.KV_CACHE: ("K", "white on magenta"),
    Category.TEMPORARY: ("T", "black on white"),
    Category.RUNTIME: ("R", "white on bright_black"),
}
"""Letter and style of what a byte is held for, in the order in which bars show them."""
_JUSTIFIED: tuple[JustifyMethod, ...] = ("left", "right", "left", "right", "left")
"""Columns of the phases: name, bytes, bar, seconds, what bounds them."""
_PHASE_COLUMNS = (
    2 + len("> backward") + 2 + len("1023 GiB") + 2 + len("|") + 2 + 2 + len("bandwidth")
)
"""Columns of a phase's line without the bar and the seconds."""
_VERDICTS = {
    Verdict.FITS: "bold green",
    Verdict.TIGHT: "bold yellow",
    Verdict.DOES_NOT_FIT: "bold red",
}


def document_screen(document: Document, *, width: int) -> RenderableType:
    """Return `document` as a screen of `width` columns, all but its last line, `next_step`."""
    fits = document.verdict is not Verdict.DOES_NOT_FIT
    parts = [_verdict(document)]
    if not fits:
        parts.append(
            _alternatives(document, "What would fit", width)
            if document.alternatives
            else _section("Nothing that was tried fits", Text("a smaller model or a larger card"))
        )
    parts += [_card(document), _phases(document, width), _largest(document), _tuned(document)]
    if document.rehearsal is not None:
        parts.append(_rehearsal(document, width))
    if fits and document.alternatives:
        parts.append(_alternatives(document, "Next best", width))
    if fits and document.trl_arguments:
        parts.append(_trl(document, width))
    if document.assumptions:
        parts.append(_section("Assumed", _rows(("-", text) for text in document.assumptions)))
    return Group(*parts, Text())


def next_step(document: Document) -> Text:
    """Return the answer again, with the command to type next: one line, however long."""
    verdict = (document.verdict.upper(), _VERDICTS[document.verdict])
    if document.verdict is Verdict.DOES_NOT_FIT:
        flags = next((other.flags for other in document.alternatives if other.flags), None)
        if flags is None:
            return Text.assemble(verdict, "  no flag makes it fit")
        return Text.assemble(verdict, "  next: add ", (flags, "bold"))
    if document.recipe_path is None:
        return Text.assemble(
            verdict, "  next: add --recipe RECIPE.toml, then grpo-lite train RECIPE.toml"
        )
    path = shlex.quote(document.recipe_path)
    return Text.assemble(verdict, "  recipe written; next: ", (f"grpo-lite train {path}", "bold"))


def _verdict(document: Document) -> RenderableType:
    workload, memory = document.chosen.workload, document.chosen.memory
    method = method_in_words(workload)
    peak = format_bytes(memory.allocated_peak_bytes)
    budget_bytes = document.budget.card_bytes
    budget = format_bytes(budget_bytes)
    sentence = f"{document.model} by GRPO, {method}, on {document.card}: "
    if document.verdict is Verdict.DOES_NOT_FIT:
        missing = format_bytes(memory.allocated_peak_bytes - budget_bytes)
        sentence += f"{missing} too little; {memory.peak.phase} needs {peak} of {budget}"
    else:
        sentence += f"needs {peak} of {budget}"
        sentence += f" and {format_seconds(document.chosen.speed.seconds)} an update"
    sentence += " (predicted)"
    if document.verdict is Verdict.TIGHT:
        sentence += (
            f"; the prediction is good to {document.budget.uncertainty_fraction:.0%}, "
            "so the governor may have to step down"
        )
    style = _VERDICTS[document.verdict]
    return _rows([(Text(document.verdict.upper(), style=style), Text(sentence, style="bold"))])


def _card(document: Document) -> RenderableType:
    budget = document.budget
    held = [
        f"{format_bytes(num_bytes)} {what}"
        for num_bytes, what in (
            (budget.runtime_bytes, "context and kernels"),
            (budget.held_by_others_bytes, "other programs"),
            (budget.reserve_bytes, "reserve"),
        )
        if num_bytes
    ]
    after = f", after {', '.join(held)}" if held else ""
    is_full = document.num_trainable == document.num_parameters
    trained = "all" if is_full else f"{document.num_trainable:,}"
    lines = [
        (
            "model",
            _joined(
                f"{document.num_parameters:,} parameters, {trained} trained", document.model_note
            ),
        ),
        (
            "card",
            _joined(
                f"{document.card_title}, {format_bytes(budget.total_bytes)}", document.card_note
            ),
        ),
        ("", f"{format_bytes(budget.card_bytes)} for this run{after}"),
    ]
    return Group(Text(), _rows(lines))


def _phases(document: Document, width: int) -> RenderableType:
    """Return bytes as bars and seconds, a line for each phase."""
    memory, speed = document.chosen.memory, document.chosen.speed
    speeds = {phase.phase: phase for phase in speed.phases}
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in _JUSTIFIED:
        table.add_column(justify=justify, no_wrap=True)
    time_columns = max(len(format_seconds(each)) for each in (speed.seconds, 10.0))
    bar_columns = max(1, width - _PHASE_COLUMNS - time_columns)
    for estimate in memory.phases:
        is_peak = estimate is memory.peak
        timed = speeds.get(estimate.phase)
        table.add_row(
            Text(f"{'>' if is_peak else ' '} {estimate.phase}", style="bold" if is_peak else ""),
            Text(format_bytes(estimate.allocated_bytes), style="bold" if is_peak else ""),
            _bar(estimate, document, bar_columns),
            Text(format_seconds(timed.seconds) if timed else ""),
            Text(timed.bound_by if timed else "", style="dim"),
        )
    table.add_row(
        *(Text("  update"), Text()),
        Text(f"{speed.tokens_per_s:,.0f} tokens/s"),
        Text(format_seconds(speed.seconds)),
    )
    title = (
        "Predicted by phase, at the length caps "
        f"(| is the budget, {format_bytes(document.budget.card_bytes)})"
    )
    return _section(title, table, _legend(memory.phases, memory.peak, width))


def _bar(estimate: PhaseEstimate, document: Document, columns: int) -> Text:
    """Return the bytes of a phase as letters, with a mark at the budget."""
    budget_bytes = document.budget.card_bytes
    scale_bytes = max(budget_bytes, document.chosen.memory.allocated_peak_bytes)
    budget_column = round(budget_bytes / scale_bytes * columns)
    cells = [("." if column < budget_column else " ", "dim") for column in range(columns + 1)]
    start, used_bytes = 0, 0
    for category, (letter, style) in _CATEGORIES.items():
        used_bytes += estimate.by_category.get(category, 0)
        end = min(columns, round(used_bytes / scale_bytes * columns))
        cells[start:end] = [(letter, style)] * (end - start)
        start = end
    over = estimate.allocated_bytes > budget_bytes
    cells[budget_column] = ("|", "bold red" if over else "bold")
    return Text.assemble(*cells)


def _legend(phases: Sequence[PhaseEstimate], peak: PhaseEstimate, width: int) -> Text:
    """Return the letters with their bytes at the peak; those of other phases only come last."""
    at_peak, elsewhere = [], []
    for category, (letter, style) in _CATEGORIES.items():
        word = CATEGORY_WORDS[category]
        num_bytes = peak.by_category.get(category, 0)
        if num_bytes:
            at_peak.append(Text.assemble((letter, style), f" {word} {format_bytes(num_bytes)}"))
        elif any(phase.by_category.get(category) for phase in phases):
            elsewhere.append(Text.assemble((letter, style), f" {word}"))
    return _packed([Text("at the peak:"), *at_peak, *elsewhere], width - 2)


def _largest(document: Document) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    for tensor in largest_at_peak(document)[:MAX_TENSORS]:
        table.add_row(
            Text(format_bytes(tensor.num_bytes), style="bold"),
            Text("="),
            Text.assemble(tensor.arithmetic, "  ", (tensor.what, "dim")),
        )
    return _section(f"Largest at the peak ({document.chosen.memory.peak.where})", table)


def _tuned(document: Document) -> RenderableType:
    workload, plan = document.chosen.workload, document.chosen.plan
    nearest = "" if document.verdict is not Verdict.DOES_NOT_FIT else ", the nearest to fitting"
    batch = (
        f"effective batch {workload.num_rows} rows = {workload.prompts_per_step} prompts x "
        f"{workload.num_generations} generations = {plan.micro_batch} x "
        f"{plan.gradient_accumulation_steps}: not changed"
    )
    title = (
        f"Tuned{nearest}: {document.num_candidates:,} plans priced, an answer in "
        f"{format_seconds(document.seconds)}"
    )
    table = _rows((choice.setting, choice.value, choice.reason) for choice in document.choices)
    return _section(title, table, Text(batch))


def _rehearsal(document: Document, width: int) -> RenderableType:
    assert document.rehearsal is not None
    parts = []
    for phase, measured_bytes in document.rehearsal.peak_bytes.items():
        estimate = document.chosen.memory.of(phase)
        if estimate is not None and measured_bytes:
            error = estimate.allocated_bytes / measured_bytes - 1
            parts.append(Text(f"{phase} {format_bytes(measured_bytes)} ({error:+.1%})"))
    title = (
        f"Rehearsed at full depth on fake tensors in {format_seconds(document.rehearsal.seconds)}"
        " (error of the prediction)"
    )
    return _section(title, _packed(parts, width - 2))


def _alternatives(document: Document, title: str, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for other in document.alternatives:
        table.add_row(
            Text(format_bytes(other.peak_bytes)),
            Text(format_seconds(other.seconds)),
            Text(other.verdict, style=_VERDICTS[other.verdict]),
            _alternative_words(other, width - 40),
        )
    starred = any(other.changes_experiment for other in document.alternatives)
    note = "; * is another experiment" if starred else ""
    return _section(f"{title} (predicted peak, time of an update{note})", table)


def _alternative_words(other: Alternative, columns: int) -> Text:
    words = Text(f"{'* ' if other.changes_experiment else ''}{other.description}")
    if other.flags:
        words.append("  " if len(words) + len(other.flags) < columns else "\n")
        words.append(other.flags, style="bold")
    return words


def _trl(document: Document, width: int) -> RenderableType:
    """Return the arguments as Python that can be pasted: flush left, lines whole."""
    arguments = [Text(f"{name}={value!r},") for name, value in document.trl_arguments.items()]
    body = _packed(arguments, width - 4, between=" ").plain
    code = f"config = GRPOConfig(\n{textwrap.indent(body, '    ')}\n)"
    return Group(Text(), Text("The same in TRL", style="bold"), Text(code))


def _section(title: str, *body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(Group(*body), (0, 0, 0, 2)))


def _joined(text: str, note: str) -> str:
    return f"{text}; {note}" if note else text


def _packed(items: Sequence[Text], columns: int, *, between: str = "  ") -> Text:
    """Return `items` in lines of at most `columns`, none broken."""
    packed, used = Text(), 0
    for item in items:
        if used and used + len(between) + len(item) > columns:
            packed.append("\n")
            used = 0
        elif used:
            packed.append(between)
            used += len(between)
        packed.append_text(item)
        used += len(item)
    return packed


def _rows(rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return aligned rows whose last column folds."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
