"""Prompts in, scored completions out: one rollout of the policy under the governor's eye.

The rows of a rollout that are finished stay finished: after an out-of-memory only the rest is
sampled again, in smaller slices, from the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from grpo_lite.grpo.advantages import group_advantages, rewards_tensor
from grpo_lite.grpo.batch import RolloutBatch
from grpo_lite.grpo.data import Example
from grpo_lite.grpo.objective import (
    Normalizers,
    ObjectiveSettings,
    loss_mask,
    rows_with_gradient,
)
from grpo_lite.grpo.rewards import RewardSet, Scores
from grpo_lite.grpo.rollout import Sampling, generate_slice, make_batch, row_noise
from grpo_lite.grpo.update import Policy, UpdateData, score_rows
from grpo_lite.plan import Phase, Plan
from grpo_lite.predict.footprint import Shape

Result = TypeVar("Result")


class Watcher(Protocol):
    """What a rollout asks of the governor."""

    plan: Plan

    def watch(self, phase: Phase, shape: Shape) -> None:
        """Begin a phase."""
        ...

    def amend(self, shape: Shape) -> None:
        """Correct the shape of the phase under way."""
        ...

    def attempt(
        self, function: Callable[[Plan], Result], *, undo: Callable[[], None] | None = None
    ) -> Result:
        """Run `function`, again with a lower plan after an out-of-memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """An example with its token ids."""

    example: Example
    """Where it comes from."""
    ids: tuple[int, ...]
    """Its prompt in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A rollout and what the rewards said of it."""

    batch: RolloutBatch
    """Its rows."""
    scores: Scores
    """Their rewards."""


def play(
    policy: Policy,
    prompts: Sequence[Prompt],
    governor: Watcher,
    sampling: Sampling,
    noise_key: tuple[int, int],
) -> RolloutBatch:
    """Return one completion for each of `prompts`, sampled in slices of the plan's rollout batch.

    `noise_key` is (seed, update): the noise of a row follows from it and the row's index.
    """
    done: dict[int, list[int]] = {}
    cap = sampling.workload.max_completion_length
    training = policy.model.training

    def sample_rest(plan: Plan) -> None:
        while rest := [row for row in range(len(prompts)) if row not in done][: plan.rollout_batch]:
            ids = [prompts[row].ids for row in rest]
            longest = max(len(row) for row in ids)
            governor.watch(
                Phase.ROLLOUT, Shape(rows=len(rest), tokens=longest + cap, completion=cap)
            )
            noise = row_noise(*noise_key, rest, cap)
            completions = generate_slice(policy.model, ids, noise, sampling)
            reached = max(len(row) for row in completions)
            governor.amend(Shape(rows=len(rest), tokens=longest + reached, completion=reached))
            done.update(zip(rest, completions, strict=True))

    policy.model.eval()
    try:
        governor.attempt(sample_rest)
    finally:
        policy.model.train(training)
    ids = [prompt.ids for prompt in prompts]
    return make_batch(ids, [done[row] for row in range(len(prompts))], sampling)


def score(
    batch: RolloutBatch, prompts: Sequence[Prompt], rewards: RewardSet, tokenizer: Any
) -> Scores:
    """Return the rewards of each row of `batch`, as text without special tokens."""
    texts = tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True)
    return rewards.score([prompt.example for prompt in prompts], texts)


def update_data(policy: Policy, played: Played) -> tuple[UpdateData, float]:
    """Return what the loss of `played` needs, and the share of dead groups."""
    workload = policy.workload
    batch = played.batch
    settings = ObjectiveSettings.of(workload)
    advantages = group_advantages(
        rewards_tensor(played.scores.totals), num_generations=workload.num_generations
    )
    longest = max(1, *(len(ids) for ids in batch.completion_ids))
    lengths = torch.tensor([len(ids) for ids in batch.completion_ids])
    tokens = torch.arange(longest)[None, :] < lengths[:, None]
    mask = loss_mask(tokens, torch.tensor(batch.truncated), settings)
    needed = rows_with_gradient(advantages.values_R, settings, mask)
    data = UpdateData(
        batch=batch,
        advantages_R=advantages.values_R,
        mask_RC=mask,
        normalizers=Normalizers.of(mask),
        rows=tuple(needed.nonzero().flatten().tolist()),
    )
    return data, advantages.dead_fraction


def add_logprobs(policy: Policy, data: UpdateData, governor: Watcher) -> UpdateData:
    """Return `data` with the old and reference log-probs that the workload needs."""
    workload = policy.workload
    if not workload.needs_logprob_phase or not data.rows:
        return data

    def scored(plan: Plan) -> torch.Tensor:
        return score_rows(policy, data.batch, data.rows, plan, governor.watch)

    old = governor.attempt(scored) if workload.num_iterations > 1 else None
    reference = None
    if workload.beta > 0:
        with policy.model.disable_adapter():  # the base model is the reference
            reference = governor.attempt(scored)
    return replace(data, old_logprobs_RC=old, ref_logprobs_RC=reference)
