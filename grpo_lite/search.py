"""The one decision maker: which plan is the fastest that fits, and which is the next one down.

Pure functions over frozen data; the governor asks `step_down` instead of keeping a ladder of its
own.
Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from grpo_lite.cards.card import Budget
from grpo_lite.cards.profile import CardProfile
from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import Footprint
from grpo_lite.predict.memory import MemoryEstimate, estimate_memory
from grpo_lite.predict.speed import SpeedEstimate, Tiers, estimate_speed
from grpo_lite.units import format_bytes

MIN_CHUNK_TOKENS = 64
"""Smallest head chunk searched: below it the matrix products are too thin to be worth it."""


_UPDATE_PHASES = (Phase.LOGPROB, Phase.FORWARD, Phase.BACKWARD)
"""Phases that work on micro-batches and so obey the same fields of a plan."""


class Verdict(StrEnum):
    """What the prediction says of a candidate on a budget."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a workload, with its predicted price."""

    workload: Workload
    """The experiment."""
    plan: Plan
    """How it would be run."""
    memory: MemoryEstimate
    """Predicted bytes."""
    speed: SpeedEstimate
    """Predicted seconds."""
    verdict: Verdict
    """Whether it fits the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search is about: one footprint on one card within one budget."""

    footprint: Footprint
    """What the trace learnt."""
    profile: CardProfile
    """The card's figures."""
    budget: Budget
    """Bytes that may be used."""
    tiers: Mapping[str, Tiers] = field(default_factory=dict)
    """Offloads that the host's budgets allow, by `Plan.offload`, with what each would move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """What a plan needs in one phase, and in all that obey the same fields."""

    of_phase: int
    """Bytes of the phase asked about."""
    together: tuple[int, int]
    """Bytes of the largest of these phases, and the sum of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lower:
    """One way down."""

    plan: Plan
    """The plan."""
    needs: _Needs
    """What it needs."""
    seconds: float
    """Predicted seconds of an update."""


def verdict_of(memory: MemoryEstimate, budget: Budget) -> Verdict:
    """Return whether `memory` fits: tight is inside the stated uncertainty of the prediction."""
    peak_bytes = memory.allocated_peak_bytes
    if peak_bytes > budget.card_bytes:
        return Verdict.DOES_NOT_FIT
    if peak_bytes * (1 + budget.uncertainty_fraction) > budget.card_bytes:
        return Verdict.TIGHT
    return Verdict.FITS


def price(question: Question, workload: Workload, plan: Plan) -> Candidate:
    """Return `plan` for `workload` with its predicted bytes, seconds and verdict."""
    memory = estimate_memory(question.footprint, workload, plan)
    return Candidate(
        workload=workload,
        plan=plan,
        memory=memory,
        speed=_speed(question, workload, plan),
        verdict=verdict_of(memory, question.budget),
    )


def search_plans(question: Question, workload: Workload) -> list[Candidate]:
    """Return every candidate for `workload`, best first.

    Those that fit come first by speed, then the tight ones by speed, then the rest by their peak.
    Ties in time go to fewer bytes, then to fewer, larger micro-batches.
    """
    candidates = [
        price(question, workload, replace(plan, offload=offload))
        for offload in ("none", *question.tiers)
        for plan in enumerate_plans(workload)
    ]
    return sorted(candidates, key=_rank)


def enumerate_plans(workload: Workload) -> Iterator[Plan]:
    """Yield the plans of the search; each keeps the effective batch of `workload`."""
    rows = workload.num_rows
    for micro_batch in _divisors(rows):
        for checkpointing in (False, True):
            for chunk in chunk_choices(micro_batch * workload.max_completion_length):
                for rollout_batch in _divisors(rows):
                    yield Plan(
                        micro_batch=micro_batch,
                        gradient_accumulation_steps=rows // micro_batch,
                        gradient_checkpointing=checkpointing,
                        logprob_chunk_tokens=chunk,
                        rollout_batch=rollout_batch,
                    )


def least_memory(
    footprint: Footprint, workload: Workload, *, offload: str = "none"
) -> MemoryEstimate:
    """Return the estimate of the plan that needs the least memory; if it does not fit, none does.

    More rows at once never need less, but one micro-batch of all rows needs no gradients beside
    its own: all divisions of the rows are looked at.
    """
    chunk = min(MIN_CHUNK_TOKENS, workload.max_completion_length)
    plans = (
        Plan(
            micro_batch=micro_batch,
            gradient_accumulation_steps=workload.num_rows // micro_batch,
            gradient_checkpointing=True,
            logprob_chunk_tokens=chunk,
            rollout_batch=1,
            offload=offload,
        )
        for micro_batch in _divisors(workload.num_rows)
    )
    estimates = (estimate_memory(footprint, workload, plan) for plan in plans)
    return min(estimates, key=lambda estimate: estimate.allocated_peak_bytes)


def step_down(
    question: Question, workload: Workload, plan: Plan, phase: Phase, shortfall_bytes: int
) -> Plan | None:
    """Return the fastest plan that needs at least `shortfall_bytes` less than `plan` in `phase`.

    Only the fields that `phase` obeys are changed, and never the effective batch.
    The other phases that obey the same fields must not need more than that either: a plan that
    moves the failure from forward to backward is no way down.
    Where nothing is low enough, the lowest plan that lowers `phase` at all is returned, and None
    where there is none.
    Each plan's largest phase is lower than the one's before (or as low, with a lower sum), so that
    repeated calls end, whatever phases they name.
    """
    now = _phase_needs(question, workload, plan, phase)
    lower: list[_Lower] = []
    for enumerated in enumerate_plans(workload):
        other = replace(enumerated, offload=plan.offload)  # blocks do not move house in mid-run
        if not _only_changes_what_obeys(phase, plan, other):
            continue
        needs = _phase_needs(question, workload, other, phase)
        if needs.of_phase < now.of_phase and needs.together < now.together:
            seconds = _speed(question, workload, other).seconds
            lower.append(_Lower(plan=other, needs=needs, seconds=seconds))
    if not lower:
        return None
    wanted_bytes = now.of_phase - max(1, shortfall_bytes)
    enough = [one for one in lower if one.needs.together[0] <= wanted_bytes]
    if enough:
        best = min(enough, key=lambda one: (one.seconds, one.needs.together))
    else:
        best = min(lower, key=lambda one: (one.needs.together, one.seconds))
    reason = (
        f"out of memory in {phase} by {format_bytes(shortfall_bytes)}; predicted "
        f"{format_bytes(now.of_phase)} before, {format_bytes(best.needs.of_phase)} after"
    )
    changed = plan.changes_to(best.plan)
    return replace(best.plan, reasons=plan.reasons).with_reasons(**dict.fromkeys(changed, reason))


def chunk_choices(num_tokens: int) -> list[int]:
    """Return head chunk sizes to try: all tokens at once and powers of two below."""
    choices = [num_tokens]
    chunk = MIN_CHUNK_TOKENS
    while chunk < num_tokens:
        choices.append(chunk)
        chunk *= 2
    return choices


def _speed(question: Question, workload: Workload, plan: Plan) -> SpeedEstimate:
    tiers = question.tiers.get(plan.offload)
    return estimate_speed(question.footprint, workload, plan, question.profile, tiers)


def _only_changes_what_obeys(phase: Phase, plan: Plan, other: Plan) -> bool:
    changed = set(plan.changes_to(other))
    if phase is Phase.ROLLOUT:
        return changed == {"rollout_batch"}
    return bool(changed) and "rollout_batch" not in changed


def _phase_needs(question: Question, workload: Workload, plan: Plan, phase: Phase) -> _Needs:
    together = _UPDATE_PHASES if phase in _UPDATE_PHASES else (phase,)
    estimates = estimate_memory(question.footprint, workload, plan)
    needs = {e.phase: e.allocated_bytes for e in estimates.phases if e.phase in together}
    return _Needs(
        of_phase=needs.get(phase, 0), together=(max(needs.values(), default=0), sum(needs.values()))
    )


def _rank(candidate: Candidate) -> tuple[int, float, int, int]:
    peak_bytes = candidate.memory.allocated_peak_bytes
    order = list(Verdict).index(candidate.verdict)
    if candidate.verdict is Verdict.DOES_NOT_FIT:
        return (order, float(peak_bytes), peak_bytes, 0)
    seconds = candidate.speed.seconds
    return (order, seconds, peak_bytes, candidate.plan.gradient_accumulation_steps)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
