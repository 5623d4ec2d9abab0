"""Sampling completions: prefill, decode steps, and noise that belongs to the row.

A row's random numbers depend on the seed, the update and the row alone, never on how many rows are
sampled together, so that a rollout in smaller slices draws the same samples (up to the rounding of
the model's own forward).
The trace runs `prefill` and `decode` as they are here.

Shape legend: R rows, P prompt tokens (left-padded), V vocabulary, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_lite.grpo.batch import RolloutBatch
from grpo_lite.grpo.policy import autocast
from grpo_lite.plan import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn and where they end."""

    workload: Workload
    """Gives the cap, the temperature and the compute dtype."""
    eos_ids: tuple[int, ...]
    """Tokens that end a completion."""
    pad_id: int
    """Fills rows that are shorter or have ended."""
    greedy: bool = False
    """Take the likeliest token instead of drawing."""


@dataclass(slots=True)
class DecodeState:
    """A slice of rows in the middle of sampling."""

    cache: Any
    """The model's KV cache."""
    mask: torch.Tensor
    """True where the cache holds a real token; [R, P + C], its first `length` columns in use."""
    positions: torch.Tensor
    """Position of the token that comes next in each row; [R, 1]."""
    length: int
    """Tokens in the cache, padding included."""


def row_noise(seed: int, update: int, rows: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Return uniform numbers in [0, 1) on the host, [R, `num_tokens`] float32.

    Each row's are drawn by a generator of its own, seeded by (seed, update, row).
    """
    noise = torch.empty(len(rows), num_tokens)
    for index, row in enumerate(rows):
        mixed = (seed * 1_000_003 + update) * 1_000_003 + row
        generator = torch.Generator().manual_seed(mixed % 2**63)
        noise[index] = torch.rand(num_tokens, generator=generator)
    return noise


def prefill(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor, cache: Any
) -> tuple[torch.Tensor, DecodeState]:
    """Run the prompts [R, P] through `model`; return logits of the next token [R, V] and the state.

    `mask` is bool [R, P + C], true at prompt tokens and in the whole of C.
    """
    num_tokens = input_ids.shape[1]
    counted = mask[:, :num_tokens].cumsum(1)
    logits = model(
        input_ids=input_ids,
        attention_mask=mask[:, :num_tokens],
        position_ids=(counted - 1).clamp_(min=0),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    state = DecodeState(
        cache=cache, mask=mask, positions=counted[:, -1:].clone(), length=num_tokens
    )
    return logits[:, -1].float(), state


def decode(model: Any, tokens: torch.Tensor, state: DecodeState) -> torch.Tensor:
    """Feed one token per row, [R]; return logits of the next one [R, V] and move `state` on."""
    state.length += 1
    logits = model(
        input_ids=tokens[:, None],
        attention_mask=state.mask[:, : state.length],
        position_ids=state.positions,
        cache=state.cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    state.positions += 1
    next_logits: torch.Tensor = logits[:, -1].float()
    return next_logits


def sample(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return one token per row, [R], by inverting the cumulative distribution at `noise` [R].

    `logits` [R, V] float32 is overwritten.
    """
    cumulative = logits.div_(temperature).softmax(-1).cumsum(-1)
    # The last entry differs from 1 by rounding; scaling keeps the drawn index inside.
    wanted = noise[:, None] * cumulative[:, -1:]
    return (
        torch.searchsorted(cumulative, wanted, right=True)
        .squeeze(1)
        .clamp_(max=logits.shape[1] - 1)
    )


def make_cache(model: Any) -> Any:
    """Return an empty KV cache that grows as transformers' own `generate` lets it grow."""
    from transformers import DynamicCache

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return DynamicCache(config=inner.config)


def generate_slice(
    model: Any, prompts: Sequence[Sequence[int]], noise: torch.Tensor, sampling: Sampling
) -> list[list[int]]:
    """Return sampled token ids for each of `prompts`, each cut after its first end token.

    `noise` is [R, C] on the host; all rows are in the cache at once.
    """
    device = next(model.parameters()).device
    cap = sampling.workload.max_completion_length
    input_ids, mask = _left_padded(prompts, cap, sampling.pad_id, device)
    noise = noise.to(device)
    eos = torch.tensor(sampling.eos_ids, device=device)
    drawn: list[torch.Tensor] = []
    with torch.no_grad(), autocast(sampling.workload, device):
        logits, state = prefill(model, input_ids, mask, make_cache(model))
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for step in range(cap):
            if step:
                logits = decode(model, drawn[-1], state)
            tokens = (
                logits.argmax(-1)
                if sampling.greedy
                else sample(logits, noise[:, step], sampling.workload.temperature)
            )
            del logits
            tokens.masked_fill_(ended, sampling.pad_id)
            drawn.append(tokens)
            ended |= torch.isin(tokens, eos)
            if bool(ended.all()):
                break
    columns = torch.stack(drawn, 1).cpu().tolist()
    return [_until_end(row, sampling.eos_ids) for row in columns]


def make_batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], sampling: Sampling
) -> RolloutBatch:
    """Return sampled rows as a batch on the host."""
    return RolloutBatch(
        prompt_ids=tuple(tuple(ids) for ids in prompts),
        completion_ids=tuple(tuple(ids) for ids in completions),
        truncated=tuple(not ids or ids[-1] not in sampling.eos_ids for ids in completions),
    )


def slices(num_rows: int, rollout_batch: int) -> Iterator[range]:
    """Yield the rows of each slice of a rollout."""
    for start in range(0, num_rows, rollout_batch):
        yield range(start, min(start + rollout_batch, num_rows))


def _left_padded(
    prompts: Sequence[Sequence[int]], cap: int, pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids in prompts)
    input_ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask = torch.ones(len(prompts), longest + cap, dtype=torch.bool)
    for index, ids in enumerate(prompts):
        input_ids[index, longest - len(ids) :] = torch.tensor(ids)
        mask[index, : longest - len(ids)] = False
    return input_ids.to(device), mask.to(device)


def _until_end(row: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    for index, token in enumerate(row):
        if token in eos_ids:
            return row[: index + 1]
    return row
