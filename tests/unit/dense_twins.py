"""The slow, plain twins of the fast routines of `grpo_lite.grpo`: full logits, loops, no tricks."""

import math
from dataclasses import dataclass

import torch

from grpo_lite.grpo.logprobs import HeadWeights


def dense_logits(hidden, head: HeadWeights, *, temperature: float):
    """Return all logits / temperature, widened to fp32 where autograd's own path would be bf16."""
    product = torch.nn.functional.linear(hidden, head.weight_VH, head.bias_V)
    if product.dtype == torch.bfloat16:
        product = product.float()
    logits = product * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits / temperature


def dense_logprobs(hidden, head: HeadWeights, targets, *, temperature: float):
    """Return log-probabilities of the targets and entropies, by torch's log_softmax."""
    log_shares = dense_logits(hidden, head, temperature=temperature).log_softmax(-1)
    logprobs = log_shares.gather(1, targets[:, None]).squeeze(1)
    return logprobs, -(log_shares.exp() * log_shares).sum(1)


@dataclass
class PlainRow:
    """One completion, without padding: Python floats."""

    advantage: float
    new: list[float]
    old: list[float]
    ref: list[float]


def plain_loss(rows: list[PlainRow], settings, *, num_rows: int, num_tokens: int) -> float:
    """Return the loss of an update token by token, as the papers write it."""
    total = 0.0
    for row in rows:
        steps = [new - old for new, old in zip(row.new, row.old, strict=True)]
        terms = 0.0
        for new, ref, step in zip(row.new, row.ref, steps, strict=True):
            is_sequence = settings.importance_sampling_level == "sequence"
            ratio = math.exp(sum(steps) / len(steps) if is_sequence else step)
            terms += _plain_term(ratio, new, row.advantage, settings)
            if settings.beta:
                kl = math.exp(ref - new) - (ref - new) - 1
                terms += settings.beta * kl * (ratio if settings.use_bias_correction_kl else 1)
        if settings.loss_type == "grpo":
            total += terms / max(len(row.new), 1) / num_rows
        elif settings.loss_type == "dr_grpo":
            total += terms / (num_rows * settings.max_completion_length)
        else:
            total += terms / num_tokens
    return total


def _plain_term(ratio, new, advantage, settings):
    if settings.loss_type == "cispo":
        return -min(ratio, settings.epsilon_high) * advantage * new
    clipped = min(max(ratio, 1 - settings.epsilon), 1 + settings.epsilon_high)
    free = ratio if settings.delta is None else min(ratio, settings.delta)
    return -min(free * advantage, clipped * advantage)
