"""The sentences of the auto-tune report, the same in every rendering for pages."""

from __future__ import annotations

import textwrap

from grpo_lite.plan import Phase
from grpo_lite.report.document import Document
from grpo_lite.report.words import method_in_words
from grpo_lite.search import Verdict
from grpo_lite.units import format_bytes, format_seconds


def answer_sentence(document: Document) -> str:
    """Return the answer as one sentence."""
    workload, memory = document.chosen.workload, document.chosen.memory
    method = method_in_words(workload)
    peak, budget_bytes = memory.allocated_peak_bytes, document.budget.card_bytes
    start = f"{document.model} by GRPO, {method}, on {document.card}"
    if document.verdict is Verdict.DOES_NOT_FIT:
        return (
            f"{start}: {format_bytes(peak - budget_bytes)} too little; {memory.peak.phase} needs "
            f"{format_bytes(peak)} of {format_bytes(budget_bytes)}"
        )
    text = (
        f"{start}: needs {format_bytes(peak)} of {format_bytes(budget_bytes)} and "
        f"{format_seconds(document.chosen.speed.seconds)} an update"
    )
    if document.verdict is Verdict.TIGHT:
        text += (
            f"; the prediction is good to {document.budget.uncertainty_fraction:.0%}, so the "
            "governor may have to step down"
        )
    return text


def budget_sentence(document: Document) -> str:
    """Return what of the card is for this run."""
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
    return (
        f"{format_bytes(budget.card_bytes)} of {format_bytes(budget.total_bytes)} for this "
        f"run{after}"
    )


def batch_sentence(document: Document) -> str:
    """Return how the effective batch is made up."""
    workload, plan = document.chosen.workload, document.chosen.plan
    return (
        f"The effective batch of {workload.num_rows} rows = {workload.prompts_per_step} prompts x "
        f"{workload.num_generations} generations = {plan.micro_batch} x "
        f"{plan.gradient_accumulation_steps} is not changed."
    )


def rehearsal_rows(document: Document) -> list[tuple[Phase, int, float]]:
    """Return (phase, rehearsed bytes, error of the prediction as a fraction)."""
    assert document.rehearsal is not None
    rows = []
    for phase, num_bytes in document.rehearsal.peak_bytes.items():
        estimate = document.chosen.memory.of(phase)
        if estimate is not None and num_bytes:
            rows.append((phase, num_bytes, estimate.allocated_bytes / num_bytes - 1))
    return rows


def trl_code(document: Document, *, width: int) -> str:
    """Return TRL's arguments as Python that can be pasted, in lines of at most `width`."""
    arguments = " ".join(f"{name}={value!r}," for name, value in document.trl_arguments.items())
    body = textwrap.fill(
        arguments, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False
    )
    return f"config = GRPOConfig(\n{body}\n)"
