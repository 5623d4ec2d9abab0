"""From a question (model, card, experiment) to the report: which plan is the fastest that fits.

Resolve, footprint (cached or traced), search, rehearse; all arithmetic is `search`'s and
`predict`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lite.alternatives import Case, longest_that_fits, next_best, what_would_fit
from grpo_lite.cards.host import gains_from_bfloat16
from grpo_lite.cards.probe import PlannedCard, plan_card
from grpo_lite.cards.profile import CardProfile
from grpo_lite.footprints import get_rehearsal
from grpo_lite.frontier import frontier
from grpo_lite.models import ModelSource, resolve_model
from grpo_lite.plan import Plan, Workload
from grpo_lite.predict.speed import DISK_BYTES_PER_S, HOST_BYTES_PER_S, Tiers, assumptions
from grpo_lite.report.document import Choice, Document
from grpo_lite.search import (
    Candidate,
    Question,
    Verdict,
    chunk_choices,
    price,
    search_plans,
)
from grpo_lite.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """One question to `fit`."""

    model: str
    """Folder, config file or id."""
    card: str
    """"virtual:SIZE", "auto" or a profile's name."""
    workload: Workload
    """The experiment; its method and dtype are overruled by the two choices below."""
    method: str = "auto"
    """"full", "lora", or "auto": full where it fits, else lora."""
    dtype: str = "auto"
    """"bfloat16", "float32", or "auto": bfloat16 where the machine computes in it."""
    completion_range: tuple[int, int] | None = None
    """Lengths between which the cap may be tuned; None keeps the workload's."""
    reserve_bytes: int = 0
    """Kept free on the card."""
    host_bytes: int | None = None
    """RAM for gradient blocks and optimizer state; None: they stay on the card."""
    disk_bytes: int | None = None
    """Disk for them where RAM is short; None: no disk tier."""
    allow_network: bool = False
    """Whether a model may be looked up on the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAnswer:
    """The report, and what it is about."""

    document: Document
    """The report."""
    question: Question
    """What was searched."""
    source: ModelSource
    """The model."""


def fit(request: FitRequest, *, cache_dir: Path) -> FitAnswer:
    """Return the report on `request`, with footprints kept below `cache_dir`.

    Raises:
        UsageError: the model, the card or the experiment cannot be meant.
    """
    started_s = time.monotonic()
    source = resolve_model(request.model, allow_network=request.allow_network)
    card = plan_card(request.card, reserve_bytes=request.reserve_bytes)
    case = Case(
        source=source,
        card=card,
        cache_dir=cache_dir,
        host_bytes=request.host_bytes,
        disk_bytes=request.disk_bytes,
    )
    chosen, candidates = _choose(case, request)
    case.asked_method = chosen.workload.method
    question = case.question(chosen.workload)
    fits = chosen.verdict is not Verdict.DOES_NOT_FIT
    rehearsal = get_rehearsal(source, chosen.workload, chosen.plan, cache_dir) if fits else None
    choices = _choices(case, request, chosen, candidates)
    plan = chosen.plan.with_reasons(**{choice.setting: choice.reason for choice in choices})
    document = Document(
        model=source.name,
        model_note=_model_note(source),
        num_parameters=question.footprint.weights.num_parameters,
        num_trainable=question.footprint.weights.num_trainable,
        card=card.spec,
        card_title=card.profile.title,
        card_note=card.note,
        budget=card.budget,
        chosen=replace(chosen, plan=plan),
        choices=choices,
        alternatives=next_best(case, candidates) if fits else what_would_fit(case, chosen),
        frontier=frontier(candidates) if fits else (),
        rehearsal=rehearsal,
        trl_arguments=trl_arguments(chosen.workload, chosen.plan),
        recipe_path=None,
        assumptions=_assumptions(card, question, chosen.plan, chosen.workload.dtype),
        seconds=time.monotonic() - started_s,
        num_candidates=len(candidates),
    )
    return FitAnswer(document=document, question=question, source=source)


def trl_arguments(workload: Workload, plan: Plan) -> Mapping[str, Any]:
    """Return the arguments of TRL's GRPOConfig that correspond to `workload` under `plan`."""
    return {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.max_completion_length,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "bf16": workload.dtype == "bfloat16",
        "loss_type": workload.loss_type,
        "beta": workload.beta,
        "epsilon": workload.epsilon,
        "epsilon_high": workload.epsilon_high,
        "num_iterations": workload.num_iterations,
        "temperature": workload.temperature,
        "optim": workload.optimizer,
    }


def _choose(case: Case, request: FitRequest) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate and all that it was chosen from."""
    dtype = request.dtype
    if dtype == "auto":
        dtype = "bfloat16" if _computes_in_bfloat16(case.card) else "float32"
    methods = ("full", "lora") if request.method == "auto" else (request.method,)
    candidates: list[Candidate] = []
    for method in methods:
        workload = replace(request.workload, method=method, dtype=dtype)
        if request.completion_range is not None:
            workload = longest_that_fits(case, workload, request.completion_range)
        candidates = search_plans(case.question(workload), workload)
        if candidates[0].verdict is not Verdict.DOES_NOT_FIT:
            break
    return candidates[0], candidates


def _computes_in_bfloat16(card: PlannedCard) -> bool:
    if card.profile.form == "virtual":
        return gains_from_bfloat16()
    return card.profile.supports_bfloat16


def _choices(
    case: Case, request: FitRequest, chosen: Candidate, candidates: list[Candidate]
) -> tuple[Choice, ...]:
    """Return what was tuned, each with the price of its neighbour as the reason."""
    plan, workload = chosen.plan, chosen.workload
    choices = []
    if request.method == "auto":
        reason = "fp32 weights of all parameters fit"
        if workload.method == "lora":
            reason = "full fine-tuning does not fit this budget"
        choices.append(Choice(setting="method", value=workload.method, reason=reason))
    if request.completion_range is not None:
        low, high = request.completion_range
        reason = f"the longest between {low} and {high} that fits"
        value = f"{workload.max_completion_length}"
        choices.append(Choice(setting="max_completion_length", value=value, reason=reason))

    def against(**changes: Any) -> Candidate:
        return price(case.question(workload), workload, replace(plan, **changes))

    rows = workload.num_rows
    larger = [c.plan.micro_batch for c in candidates if c.plan.micro_batch > plan.micro_batch]
    reason = "all rows of the update at once"
    if larger:
        bigger = against(micro_batch=min(larger), gradient_accumulation_steps=rows // min(larger))
        reason = f"{min(larger)} rows: {_price_in_words(bigger, chosen)}"
    choices.append(Choice(setting="micro_batch", value=f"{plan.micro_batch}", reason=reason))
    other = against(gradient_checkpointing=not plan.gradient_checkpointing)
    without = "without" if plan.gradient_checkpointing else "with"
    choices.append(
        Choice(
            setting="gradient_checkpointing",
            value="on" if plan.gradient_checkpointing else "off",
            reason=f"{without} it: {_price_in_words(other, chosen)}",
        )
    )
    choices.append(_chunk_choice(chosen, against))
    reason = "all rows sampled at once"
    if plan.rollout_batch < rows:
        everything = against(rollout_batch=rows)
        reason = f"all {rows} at once: {_price_in_words(everything, chosen)}"
    choices.append(Choice(setting="rollout_batch", value=f"{plan.rollout_batch}", reason=reason))
    if case.question(workload).tiers:
        reason = "gradients and states fit the card"
        if plan.offload != "none":
            reason = f"on the card: {_price_in_words(against(offload='none'), chosen)}"
        choices.append(Choice(setting="offload", value=plan.offload, reason=reason))
    return tuple(choices)


def _chunk_choice(chosen: Candidate, against: Any) -> Choice:
    plan, workload = chosen.plan, chosen.workload
    tokens = plan.micro_batch * workload.max_completion_length
    reason = "all completion tokens of a micro-batch at once"
    if plan.logprob_chunk_tokens < tokens:
        everything = against(logprob_chunk_tokens=tokens)
        reason = f"all {tokens:,} tokens at once: {_price_in_words(everything, chosen)}"
    elif len(chunk_choices(tokens)) > 1:
        smaller = against(logprob_chunk_tokens=chunk_choices(tokens)[-1])
        reason += f"; {smaller.plan.logprob_chunk_tokens:,}: {_price_in_words(smaller, chosen)}"
    return Choice(
        setting="logprob_chunk_tokens", value=f"{plan.logprob_chunk_tokens:,}", reason=reason
    )


def _price_in_words(other: Candidate, chosen: Candidate) -> str:
    peak = other.memory.peak
    text = f"{format_bytes(peak.allocated_bytes)} in {peak.phase}"
    if other.verdict is Verdict.DOES_NOT_FIT:
        return f"{text}, does not fit"
    change_s = other.speed.seconds - chosen.speed.seconds
    word = "slower" if change_s >= 0 else "faster"
    return f"{text}, {format_seconds(abs(change_s))} {word}, {other.verdict}"


def _model_note(source: ModelSource) -> str:
    parts: list[str] = [source.origin]
    if source.base_id is not None:
        parts.append(f"same shape as {source.base_id}")
    if source.note:
        parts.append(source.note)
    return "; ".join(parts)


def _assumptions(card: PlannedCard, question: Question, plan: Plan, dtype: str) -> tuple[str, ...]:
    uncertainty = f"{card.budget.uncertainty_fraction:.0%}"
    tiers = question.tiers.get(plan.offload)
    offload = () if tiers is None else (_tiers_in_words(tiers, card.profile),)
    memory = "memory: every row at its length caps; tensors counted by running the model's own code"
    if card.profile.form == "virtual":
        margin = f"memory: a plan within {uncertainty} of the budget is called tight"
    else:
        margin = (
            f"memory: {uncertainty} is kept for the caching allocator's fragmentation (assumed); "
            "traced on CPU kernels, whose attention keeps what flash attention keeps"
        )
    return (memory, margin, *offload, *assumptions(card.profile, dtype))


def _tiers_in_words(tiers: Tiers, profile: CardProfile) -> str:
    text = f"offload: {format_bytes(tiers.host_bytes)} of RAM (buffers included)"
    if tiers.disk_bytes:
        text += (
            f", {format_bytes(tiers.disk_bytes)} in files, "
            f"{format_bytes(tiers.disk_written_bytes)} written in each update"
        )
    rates = (
        f"{HOST_BYTES_PER_S / 1e9:.0f} GB/s of RAM and {DISK_BYTES_PER_S / 1e9:.0f} GB/s of disk "
        "are assumed"
    )
    if profile.host_bandwidth_bytes_per_s and profile.disk_read_bytes_per_s:
        rates = "RAM and disk at their measured rates"
    return f"{text}; {rates}, and no copy is counted as hidden behind compute"


def exit_code(document: Document) -> int:
    """Return 0 where the plan fits or is tight, 3 where nothing does."""
    return 3 if document.verdict is Verdict.DOES_NOT_FIT else 0
