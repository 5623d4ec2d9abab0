"""From a question (model, card, experiment) to the report: which plan is the fastest that fits.

Resolve, footprint (cached or traced), search, rehearse; all arithmetic is `search`'s and
`predict`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_lite.cards.host import gains_from_bfloat16
from grpo_lite.cards.probe import PlannedCard, plan_card
from grpo_lite.cards.profile import list_profiles
from grpo_lite.footprints import get_footprint, get_rehearsal
from grpo_lite.models import ModelSource, resolve_model
from grpo_lite.plan import Plan, Workload
from grpo_lite.predict.speed import ASSUMPTIONS
from grpo_lite.report.document import Alternative, Choice, Document
from grpo_lite.search import (
    Candidate,
    Question,
    Verdict,
    chunk_choices,
    least_memory,
    price,
    search_plans,
    verdict_of,
)
from grpo_lite.units import format_bytes, format_seconds

SMALLEST_COMPLETION_TOKENS = 16
"""Below it a shorter completion is not worth proposing."""


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


@dataclass(slots=True)
class _Case:
    """One question under way: the footprints by method, asked for once each."""

    source: ModelSource
    card: PlannedCard
    cache_dir: Path
    asked_method: str = "full"
    questions: dict[str, Question] = field(default_factory=dict)

    def question(self, workload: Workload) -> Question:
        if workload.method not in self.questions:
            self.questions[workload.method] = Question(
                footprint=get_footprint(self.source, workload, self.cache_dir),
                profile=self.card.profile,
                budget=self.card.budget,
            )
        return self.questions[workload.method]


def fit(request: FitRequest, *, cache_dir: Path) -> FitAnswer:
    """Return the report on `request`, with footprints kept below `cache_dir`.

    Raises:
        UsageError: the model, the card or the experiment cannot be meant.
    """
    started_s = time.monotonic()
    source = resolve_model(request.model, allow_network=request.allow_network)
    card = plan_card(request.card, reserve_bytes=request.reserve_bytes)
    case = _Case(source=source, card=card, cache_dir=cache_dir)
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
        alternatives=_next_best(case, candidates) if fits else _what_would_fit(case, chosen),
        rehearsal=rehearsal,
        trl_arguments=trl_arguments(chosen.workload, chosen.plan),
        recipe_path=None,
        assumptions=_assumptions(card),
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


def _choose(case: _Case, request: FitRequest) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate and all that it was chosen from."""
    dtype = request.dtype
    if dtype == "auto":
        dtype = "bfloat16" if _computes_in_bfloat16(case.card) else "float32"
    methods = ("full", "lora") if request.method == "auto" else (request.method,)
    candidates: list[Candidate] = []
    for method in methods:
        workload = replace(request.workload, method=method, dtype=dtype)
        if request.completion_range is not None:
            workload = _longest_that_fits(case, workload, request.completion_range)
        candidates = search_plans(case.question(workload), workload)
        if candidates[0].verdict is not Verdict.DOES_NOT_FIT:
            break
    return candidates[0], candidates


def _computes_in_bfloat16(card: PlannedCard) -> bool:
    if card.profile.form == "virtual":
        return gains_from_bfloat16()
    return card.profile.supports_bfloat16


def _longest_that_fits(case: _Case, workload: Workload, lengths: tuple[int, int]) -> Workload:
    """Return `workload` with the longest cap in `lengths` that fits, else with the shortest."""
    low, high = lengths
    if _fits_at(case, workload, high):
        return replace(workload, max_completion_length=high)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits_at(case, workload, middle) else (low, middle)
    return replace(workload, max_completion_length=low)


def _fits_at(case: _Case, workload: Workload, completion: int) -> bool:
    shorter = replace(workload, max_completion_length=completion)
    memory = least_memory(case.question(shorter).footprint, shorter)
    return verdict_of(memory, case.card.budget) is Verdict.FITS


def _choices(
    case: _Case, request: FitRequest, chosen: Candidate, candidates: list[Candidate]
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


def _next_best(case: _Case, candidates: list[Candidate]) -> tuple[Alternative, ...]:
    """Return the best plans with another micro-batch or checkpointing, and longer completions."""
    chosen = candidates[0]
    found: list[Alternative] = []
    seen = {(chosen.plan.micro_batch, chosen.plan.gradient_checkpointing)}
    for candidate in candidates:
        plan = candidate.plan
        kind = (plan.micro_batch, plan.gradient_checkpointing)
        if kind in seen or candidate.verdict is Verdict.DOES_NOT_FIT or len(found) == 3:
            continue
        seen.add(kind)
        checkpointing = "on" if plan.gradient_checkpointing else "off"
        found.append(
            _alternative(
                candidate, f"micro-batch {plan.micro_batch}, checkpointing {checkpointing}"
            )
        )
    workload = chosen.workload
    double = replace(workload, max_completion_length=2 * workload.max_completion_length)
    best = search_plans(case.question(double), double)[0]
    if best.verdict is not Verdict.DOES_NOT_FIT:
        flags = f"--max-completion-length {double.max_completion_length}"
        found.append(_alternative(best, "twice the completion length", flags, changes=True))
    return tuple(found)


def _what_would_fit(case: _Case, chosen: Candidate) -> tuple[Alternative, ...]:
    """Return changes with which the question would fit: shorter, LoRA, another card."""
    workload = chosen.workload
    found: list[Alternative] = []
    low = SMALLEST_COMPLETION_TOKENS
    if low < workload.max_completion_length and _fits_at(case, workload, low):
        shorter = _longest_that_fits(case, workload, (low, workload.max_completion_length))
        best = search_plans(case.question(shorter), shorter)[0]
        flags = f"--max-completion-length {shorter.max_completion_length}"
        found.append(_alternative(best, "shorter completions", flags, changes=True))
    if workload.method == "full":
        lora = replace(workload, method="lora")
        best = search_plans(case.question(lora), lora)[0]
        if best.verdict is not Verdict.DOES_NOT_FIT:
            found.append(
                _alternative(best, "LoRA instead of all weights", "--method lora", changes=True)
            )
        else:
            found.extend(_smallest_card(case, lora, "--method lora ", "LoRA on "))
    found.extend(_smallest_card(case, workload))
    return tuple(found)


def _smallest_card(
    case: _Case, workload: Workload, flags: str = "", words: str = ""
) -> list[Alternative]:
    """Return the card with the least memory that would do it, as a list of at most one."""
    footprint = case.question(workload).footprint
    memory = least_memory(footprint, workload)
    cards = [plan_card(name) for name in list_profiles()]
    enough = [card for card in cards if verdict_of(memory, card.budget) is Verdict.FITS]
    if not enough:
        return []
    consumer = [card for card in enough if card.profile.form in ("laptop", "desktop")]
    card = min(consumer or enough, key=lambda card: (card.budget.total_bytes, card.spec))
    question = Question(footprint=footprint, profile=card.profile, budget=card.budget)
    best = search_plans(question, workload)[0]
    description = f"{words}a larger card: {card.profile.title}"
    changes = workload.method != case.asked_method
    return [_alternative(best, description, f"{flags}--card {card.spec}", changes=changes)]


def _alternative(
    candidate: Candidate, description: str, flags: str = "", *, changes: bool = False
) -> Alternative:
    return Alternative(
        description=description,
        flags=flags,
        peak_bytes=candidate.memory.allocated_peak_bytes,
        seconds=candidate.speed.seconds,
        verdict=candidate.verdict,
        changes_experiment=changes,
    )


def _model_note(source: ModelSource) -> str:
    parts: list[str] = [source.origin]
    if source.base_id is not None:
        parts.append(f"same shape as {source.base_id}")
    if source.note:
        parts.append(source.note)
    return "; ".join(parts)


def _assumptions(card: PlannedCard) -> tuple[str, ...]:
    uncertainty = f"{card.budget.uncertainty_fraction:.0%}"
    memory = "memory: every row at its length caps; tensors counted by running the model's own code"
    if card.profile.form == "virtual":
        margin = f"memory: a plan within {uncertainty} of the budget is called tight"
    else:
        margin = (
            f"memory: {uncertainty} is kept for the caching allocator's fragmentation (assumed); "
            "traced on CPU kernels, whose attention keeps what flash attention keeps"
        )
    return (memory, margin, *ASSUMPTIONS)


def exit_code(document: Document) -> int:
    """Return 0 where the plan fits or is tight, 3 where nothing does."""
    return 3 if document.verdict is Verdict.DOES_NOT_FIT else 0
