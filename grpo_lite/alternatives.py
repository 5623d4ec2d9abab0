"""Other ways to ask: what is nearly as good as the choice, and what would fit where nothing does.

Each is priced by the same search as the choice itself.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_lite.cards.probe import PlannedCard, plan_card
from grpo_lite.cards.profile import list_profiles
from grpo_lite.footprints import get_footprint
from grpo_lite.models import ModelSource
from grpo_lite.offload.planning import plan_tiers, tiers_of
from grpo_lite.plan import Workload
from grpo_lite.report.document import Alternative
from grpo_lite.search import (
    Candidate,
    Question,
    Verdict,
    least_memory,
    search_plans,
    verdict_of,
)
from grpo_lite.units import GIB

SMALLEST_COMPLETION_TOKENS = 16
"""Below it a shorter completion is not worth proposing."""


@dataclass(slots=True)
class Case:
    """One question under way: the footprints by method, asked for once each."""

    source: ModelSource
    card: PlannedCard
    cache_dir: Path
    asked_method: str = "full"
    host_bytes: int | None = None
    disk_bytes: int | None = None
    questions: dict[str, Question] = field(default_factory=dict)

    def question(self, workload: Workload) -> Question:
        """Return what is searched for the method of `workload`."""
        if workload.method not in self.questions:
            footprint = get_footprint(self.source, workload, self.cache_dir)
            tiers = plan_tiers(
                footprint.trainable_numels,
                host_bytes=self.host_bytes,
                disk_bytes=self.disk_bytes,
            )
            self.questions[workload.method] = Question(
                footprint=footprint,
                profile=self.card.profile,
                budget=self.card.budget,
                tiers=tiers,
            )
        return self.questions[workload.method]


def longest_that_fits(case: Case, workload: Workload, lengths: tuple[int, int]) -> Workload:
    """Return `workload` with the longest cap in `lengths` that fits, else with the shortest."""
    low, high = lengths
    if _fits_at(case, workload, high):
        return replace(workload, max_completion_length=high)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits_at(case, workload, middle) else (low, middle)
    return replace(workload, max_completion_length=low)


def _fits_at(case: Case, workload: Workload, completion: int) -> bool:
    shorter = replace(workload, max_completion_length=completion)
    memory = least_memory(case.question(shorter).footprint, shorter)
    return verdict_of(memory, case.card.budget) is Verdict.FITS


def next_best(case: Case, candidates: list[Candidate]) -> tuple[Alternative, ...]:
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


def what_would_fit(case: Case, chosen: Candidate) -> tuple[Alternative, ...]:
    """Return changes with which the question would fit: shorter, LoRA, another card."""
    workload = chosen.workload
    found: list[Alternative] = []
    low = SMALLEST_COMPLETION_TOKENS
    if low < workload.max_completion_length and _fits_at(case, workload, low):
        shorter = longest_that_fits(case, workload, (low, workload.max_completion_length))
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
    found.extend(_off_the_card(case, workload))
    found.extend(_smallest_card(case, workload))
    return tuple(found)


def _off_the_card(case: Case, workload: Workload) -> list[Alternative]:
    """Return the offload to RAM that would do it, as a list of at most one."""
    question = case.question(workload)
    numels = question.footprint.trainable_numels
    if not numels or "host" in question.tiers:
        return []
    memory = least_memory(question.footprint, workload, offload="host")
    if verdict_of(memory, question.budget) is Verdict.DOES_NOT_FIT:
        return []
    tiers = tiers_of(numels, host_bytes=sys.maxsize)
    best = search_plans(replace(question, tiers={"host": tiers}), workload)[0]
    needed = f"{math.ceil(tiers.host_bytes / GIB)}GiB"
    return [
        _alternative(best, f"gradients and states in {needed} of RAM", f"--host-budget {needed}")
    ]


def _smallest_card(
    case: Case, workload: Workload, flags: str = "", words: str = ""
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
