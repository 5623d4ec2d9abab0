"""The auto-tune report as a screen for people: the answer first, then what it rests on.

Adds layout and nothing else; letters carry what colour also says, so that it reads without colour.
Every text is a `Text`, since names of models and tensors may hold square brackets.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_lite.plan import Category
from grpo_lite.predict.memory import PhaseEstimate
from grpo_lite.report.document import Alternative, Document
from grpo_lite.search import Verdict
from grpo_lite.units import format_bytes, format_seconds

MAX_TENSORS = 4
"""Rows of the list of the largest tensors."""

_CATEGORIES = {
    Category.PARAMETER: ("W", "weights", "white on blue"),
    Category.GRADIENT: ("G", "gradients", "black on green"),
    Category.OPTIMIZER_STATE: ("O", "optimizer states", "black on yellow"),
    Category.ACTIVATION: ("A", "activations", "black on cyan"),
    Category.LOGITS: ("L", "logits", "white on red"),
    Category.KV_CACHE: ("K", "KV cache", "white on magenta"),
    Category.TEMPORARY: ("T", "temporary", "black on white"),
    Category.RUNTIME: ("R", "runtime", "white on bright_black"),
}
"""Letter, word and style of what a byte is held for, in the order in which bars show them."""
_VERDICTS = {
    Verdict.FITS: "bold green",
    Verdict.TIGHT: "bold yellow",
    Verdict.DOES_NOT_FIT: "bold red",
}


def document_screen(document: Document, *, width: int) -> RenderableType:
    """Return `document` as a screen of `width` columns; the last line repeats the answer."""
    fits = document.verdict is not Verdict.DOES_NOT_FIT
    parts = [_verdict(document)]
    if not fits:
        parts.append(_alternatives(document, "What would fit" if document.alternatives else ""))
    parts += [_card(document), _phases(document, width), _largest(document), _tuned(document)]
    if document.rehearsal is not None:
        parts.append(_rehearsal(document))
    if fits and document.alternatives:
        parts.append(_alternatives(document, "Next best"))
    if fits and document.trl_arguments:
        parts.append(_trl(document, width))
    if document.assumptions:
        parts.append(_section("Assumed", _rows(("-", text) for text in document.assumptions)))
    return Group(*parts, _next(document))


def _verdict(document: Document) -> RenderableType:
    workload, memory = document.chosen.workload, document.chosen.memory
    method = f"LoRA rank {workload.lora_rank}" if workload.method == "lora" else "full fine-tuning"
    peak = format_bytes(memory.allocated_peak_bytes)
    budget_bytes = document.budget.card_bytes
    sentence = f"{document.model} by GRPO, {method}, on {document.card}: needs {peak} of "
    sentence += f"{format_bytes(budget_bytes)} (predicted)"
    if document.verdict is Verdict.DOES_NOT_FIT:
        missing = format_bytes(memory.allocated_peak_bytes - budget_bytes)
        sentence += f", {missing} are missing in {memory.peak.phase}"
    else:
        sentence += f", {format_seconds(document.chosen.speed.seconds)} an update"
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
    taken = f" less {', '.join(held)}" if held else ""
    share = document.num_trainable / document.num_parameters
    lines = [
        (
            "model",
            f"{document.num_parameters:,} parameters, {document.num_trainable:,} trained "
            f"({share:.2%}); {document.model_note}",
        ),
        ("card", f"{document.card_title}; {document.card_note}"),
        (
            "",
            f"{format_bytes(budget.total_bytes)} in all{taken}: "
            f"{format_bytes(budget.card_bytes)} for this run",
        ),
    ]
    return Group(Text(), _rows(lines))


def _phases(document: Document, width: int) -> RenderableType:
    """Return bytes as bars and seconds, a line for each phase."""
    memory, speed = document.chosen.memory, document.chosen.speed
    speeds = {phase.phase: phase for phase in speed.phases}
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    bar_columns = width - 48
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
        *(Text("  update"), Text(), Text()),
        Text(format_seconds(speed.seconds)),
        Text(f"{speed.tokens_per_s:,.0f} tok/s"),
    )
    title = (
        "Predicted by phase at the length caps: allocated bytes "
        f"(| is the budget, {format_bytes(document.budget.card_bytes)}) and seconds"
    )
    return _section(title, table, _legend(memory.phases, memory.peak))


def _bar(estimate: PhaseEstimate, document: Document, columns: int) -> Text:
    """Return the bytes of a phase as letters, with a mark at the budget."""
    budget_bytes = document.budget.card_bytes
    scale_bytes = max(budget_bytes, document.chosen.memory.allocated_peak_bytes)
    budget_column = round(budget_bytes / scale_bytes * columns)
    cells = [("." if column < budget_column else " ", "dim") for column in range(columns + 1)]
    start, used_bytes = 0, 0
    for category, (letter, _, style) in _CATEGORIES.items():
        used_bytes += estimate.by_category.get(category, 0)
        end = min(columns, round(used_bytes / scale_bytes * columns))
        cells[start:end] = [(letter, style)] * (end - start)
        start = end
    over = estimate.allocated_bytes > budget_bytes
    cells[budget_column] = ("|", "bold red" if over else "bold")
    return Text.assemble(*cells)


def _legend(phases: Sequence[PhaseEstimate], peak: PhaseEstimate) -> Text:
    legend = Text("at the peak: ")
    for category, (letter, word, style) in _CATEGORIES.items():
        if num_bytes := peak.by_category.get(category, 0):
            legend.append(letter, style=style)
            legend.append(f" {word} {format_bytes(num_bytes)}  ")
    for category, (letter, word, style) in _CATEGORIES.items():
        elsewhere = any(phase.by_category.get(category) for phase in phases)
        if elsewhere and not peak.by_category.get(category):
            legend.append(letter, style=style)
            legend.append(f" {word}  ")
    return legend


def _largest(document: Document) -> RenderableType:
    peak = document.chosen.memory.peak
    tensors = [
        (group.num_bytes, group.arithmetic, _CATEGORIES[group.category][1], group.operation)
        for group in peak.largest
    ]
    for category, num_parameters in (
        (Category.PARAMETER, document.num_parameters),
        (Category.GRADIENT, document.num_trainable),
        (Category.OPTIMIZER_STATE, document.num_trainable),
    ):
        listed = sum(group.num_bytes for group in peak.largest if group.category is category)
        num_bytes = peak.by_category.get(category, 0) - listed
        if num_bytes > 0:
            arithmetic = f"{num_parameters:,} parameters x {num_bytes / num_parameters:.3g} bytes"
            tensors.append((num_bytes, arithmetic, _CATEGORIES[category][1], ""))
    tensors.sort(key=lambda tensor: -tensor[0])
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    for num_bytes, arithmetic, word, operation in tensors[:MAX_TENSORS]:
        what = f"{word}, {operation}" if operation else word
        table.add_row(
            Text(format_bytes(num_bytes), style="bold"),
            Text("="),
            Text.assemble(arithmetic, "  ", (what, "dim")),
        )
    return _section(f"Largest at the peak: {peak.phase}, {peak.where}", table)


def _tuned(document: Document) -> RenderableType:
    workload, plan = document.chosen.workload, document.chosen.plan
    nearest = "" if document.verdict is not Verdict.DOES_NOT_FIT else ", the nearest to fitting"
    batch = (
        f"effective batch {workload.num_rows} rows = {workload.prompts_per_step} prompts x "
        f"{workload.num_generations} generations = {plan.micro_batch} x "
        f"{plan.gradient_accumulation_steps}: not changed"
    )
    title = (
        f"Tuned{nearest}: {document.num_candidates:,} plans priced in "
        f"{format_seconds(document.seconds)}"
    )
    table = _rows((choice.setting, choice.value, choice.reason) for choice in document.choices)
    return _section(title, table, Text(batch))


def _rehearsal(document: Document) -> RenderableType:
    assert document.rehearsal is not None
    parts = []
    for phase, measured_bytes in document.rehearsal.peak_bytes.items():
        estimate = document.chosen.memory.of(phase)
        if estimate is not None:
            error = estimate.allocated_bytes / measured_bytes - 1
            parts.append(f"{phase} {format_bytes(measured_bytes)} ({error:+.1%})")
    title = (
        f"Rehearsed at full depth on fake tensors in {format_seconds(document.rehearsal.seconds)}"
        " (prediction against it)"
    )
    return _section(title, Text(", ".join(parts)))


def _alternatives(document: Document, title: str) -> RenderableType:
    if not title:
        return _section(
            "Nothing that was tried fits this card", Text("take a smaller model or a larger card")
        )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for other in document.alternatives:
        table.add_row(
            Text(format_bytes(other.peak_bytes)),
            Text(format_seconds(other.seconds)),
            Text(other.verdict, style=_VERDICTS[other.verdict]),
            _alternative_words(other),
        )
    starred = any(other.changes_experiment for other in document.alternatives)
    note = "; * is another experiment" if starred else ""
    return _section(f"{title} (predicted peak, time of an update{note})", table)


def _alternative_words(other: Alternative) -> Text:
    words = Text(f"{'* ' if other.changes_experiment else ''}{other.description}")
    if other.flags:
        words.append("  ")
        words.append(other.flags, style="bold")
    return words


def _trl(document: Document, width: int) -> RenderableType:
    """Return the arguments as Python that can be pasted, packed into lines of `width`."""
    lines = ["config = GRPOConfig("]
    line = "   "
    for name, value in document.trl_arguments.items():
        argument = f" {name}={value!r},"
        if len(line) + len(argument) > width and line.strip():
            lines.append(line)
            line = "   "
        line += argument
    return Group(
        Text(), Text("The same in TRL", style="bold"), Text("\n".join([*lines, line, ")"]))
    )


def _next(document: Document) -> RenderableType:
    verdict = Text(document.verdict.upper(), style=_VERDICTS[document.verdict])
    if document.verdict is Verdict.DOES_NOT_FIT:
        fitting = [other for other in document.alternatives if other.flags]
        words = Text("add to the command: " if fitting else "no flag makes this fit")
        words.append(fitting[0].flags if fitting else "", style="bold")
    elif document.recipe_path is None:
        words = Text("add -o RECIPE.toml to keep this plan, then: grpo-lite train RECIPE.toml")
    else:
        path = shlex.quote(document.recipe_path)
        words = Text.assemble("recipe written; next: ", (f"grpo-lite train {path}", "bold"))
    return Group(Text(), _rows([(verdict, words)]))


def _section(title: str, *body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(Group(*body), (0, 0, 0, 2)))


def _rows(rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return aligned rows whose last column folds."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
