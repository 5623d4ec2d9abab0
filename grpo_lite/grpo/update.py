"""The gradients of one update: log-probs of its rows and the loss, micro-batch by micro-batch.

`micro_batch_loss` is what the trace runs; `accumulate_gradients` is what `train` runs, and it
calls the same.
Knows nothing of memory limits: who watches is told when a phase begins.

Shape legend: R rows of the rollout, B rows of a micro-batch, C completion tokens.
"""

# ruff: noqa: N803, N815 (shape suffixes are the tensors' documentation)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_lite.grpo.batch import MicroBatch, RolloutBatch, make_micro_batch, split_rows
from grpo_lite.grpo.head import body_of, head_of
from grpo_lite.grpo.logprobs import HeadWeights, chunked_logprobs
from grpo_lite.grpo.objective import (
    LossInputs,
    LossShare,
    Metrics,
    Normalizers,
    ObjectiveSettings,
    add_metrics,
    objective,
)
from grpo_lite.grpo.policy import autocast, set_checkpointing
from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import Shape

Watch = Callable[[Phase, Shape], None]
"""Called when a phase begins, with the shape that it will work on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """The model in training and what is needed to feed it; see `make_policy`."""

    model: Any
    """Causal language model, adapters included, on its device."""
    head: HeadWeights
    """Its output layer."""
    workload: Workload
    """The experiment."""
    pad_id: int
    """Fills rows on the right."""

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.head.weight_VH.device


def make_policy(model: Any, workload: Workload, *, pad_id: int) -> Policy:
    """Return the policy of `model`, whose head adds its gradient in place."""
    head = replace(head_of(model), add_into_grad=True)
    return Policy(model=model, head=head, workload=workload, pad_id=pad_id)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateData:
    """One rollout with all that its loss needs, on the host."""

    batch: RolloutBatch
    """The sampled rows."""
    advantages_R: torch.Tensor
    """Advantage of each row, fp32."""
    mask_RC: torch.Tensor
    """Bool: tokens that the loss counts."""
    normalizers: Normalizers
    """Denominators of the whole update."""
    rows: tuple[int, ...]
    """Rows whose gradient is not exactly zero: the only ones that are run."""
    old_logprobs_RC: torch.Tensor | None = None
    """Under the model that sampled; None where the update is on-policy."""
    ref_logprobs_RC: torch.Tensor | None = None
    """Under the reference model; None without a KL term."""


def begin_gradients(policy: Policy) -> None:
    """Make the gradient of a trained head, into which its backward adds chunk by chunk.

    Else autograd would hold the head's part apart from the embedding's until the very end.
    """
    weight = policy.head.weight_VH
    if weight.requires_grad and weight.grad is None:
        weight.grad = torch.zeros_like(weight)


def micro_batch_logprobs(policy: Policy, micro: MicroBatch, chunk_tokens: int) -> torch.Tensor:
    """Return log-probs [B, C] fp32 of the completion tokens of `micro`, 0 at padding.

    Runs the body over all tokens and the head over completion tokens only, `chunk_tokens` at once.
    """
    with autocast(policy.workload, policy.device):
        hidden = body_of(policy.model)(input_ids=micro.input_ids, use_cache=False).last_hidden_state
        scored = hidden.flatten(0, 1).index_select(0, micro.positions)
        del hidden
        logprobs, _ = chunked_logprobs(
            scored,
            policy.head,
            micro.targets,
            temperature=policy.workload.temperature,
            chunk_tokens=chunk_tokens,
        )
    padded = logprobs.new_zeros(micro.mask.numel())
    return padded.index_copy(0, micro.slots, logprobs).view(micro.mask.shape)


def micro_batch_loss(
    policy: Policy, micro: MicroBatch, data: UpdateData, chunk_tokens: int
) -> LossShare:
    """Return the share of `micro` in the update's loss, with its graph."""
    rows = torch.tensor(micro.rows)
    width = micro.mask.shape[1]

    def cut(padded_RC: torch.Tensor | None) -> torch.Tensor | None:
        return None if padded_RC is None else padded_RC[rows, :width].to(policy.device)

    mask = cut(data.mask_RC)
    assert mask is not None
    return objective(
        LossInputs(
            logprobs_BT=micro_batch_logprobs(policy, micro, chunk_tokens),
            advantages_B=data.advantages_R[rows].to(policy.device),
            mask_BT=mask,
            old_logprobs_BT=cut(data.old_logprobs_RC),
            ref_logprobs_BT=cut(data.ref_logprobs_RC),
        ),
        ObjectiveSettings.of(policy.workload),
        data.normalizers,
    )


def score_rows(
    policy: Policy, batch: RolloutBatch, rows: Sequence[int], plan: Plan, watch: Watch
) -> torch.Tensor:
    """Return log-probs [R, longest completion] fp32 on the host without gradient, 0 at padding.

    Scored with the same rows per forward as the training pass: bf16 log-probs depend on it.
    """
    set_checkpointing(policy.model, enabled=False)
    longest = max(len(ids) for ids in batch.completion_ids)
    out = torch.zeros(batch.num_rows, longest)
    for part in split_rows(batch, rows, plan.micro_batch):
        micro = make_micro_batch(batch, part, pad_id=policy.pad_id, device=policy.device)
        watch(Phase.LOGPROB, micro.shape(plan.logprob_chunk_tokens))
        with torch.no_grad():
            logprobs = micro_batch_logprobs(policy, micro, plan.logprob_chunk_tokens)
        out[torch.tensor(part), : logprobs.shape[1]] = logprobs.cpu()
    return out


def accumulate_gradients(
    policy: Policy, data: UpdateData, plan: Plan, watch: Watch
) -> tuple[float, Metrics]:
    """Add the gradients of the whole update to the parameters; return its loss and metric sums."""
    set_checkpointing(policy.model, enabled=plan.gradient_checkpointing)
    total_loss = 0.0
    parts: list[Metrics] = []
    for part in split_rows(data.batch, data.rows, plan.micro_batch):
        micro = make_micro_batch(data.batch, part, pad_id=policy.pad_id, device=policy.device)
        shape = micro.shape(plan.logprob_chunk_tokens)
        watch(Phase.FORWARD, shape)
        begin_gradients(policy)
        share = micro_batch_loss(policy, micro, data, plan.logprob_chunk_tokens)
        watch(Phase.BACKWARD, shape)
        share.loss.backward()
        total_loss += float(share.loss.detach())
        parts.append({name: value.cpu() for name, value in share.metrics.items()})
        # Else the graph's leftovers would live on beside the next micro-batch's.
        del share, micro
    return total_loss, add_metrics(parts)
