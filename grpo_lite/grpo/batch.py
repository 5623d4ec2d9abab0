"""What one rollout hands to the update, and its slices that a forward sees.

Rows are right-padded: under a causal mask padding on the right never reaches a real token, so that
no attention mask is needed and positions count from 0.
Shape legend: B rows, T tokens of a row (prompt + completion, padded), C completion tokens (padded),
N scored tokens in all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_lite.predict.footprint import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """One rollout, on the host: prompts and their sampled completions, row by row.

    Rows of one group (same prompt) are consecutive.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    """Token ids of the prompt of each row."""
    completion_ids: tuple[tuple[int, ...], ...]
    """Sampled token ids of each row, the first end-of-sequence token included."""
    truncated: tuple[bool, ...]
    """Whether the row reached the cap without an end-of-sequence token."""

    @property
    def num_rows(self) -> int:
        """Rows, all groups together."""
        return len(self.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Completion tokens of all rows."""
        return sum(len(ids) for ids in self.completion_ids)

    def row_tokens(self, row: int) -> int:
        """Return prompt plus completion tokens of `row`."""
        return len(self.prompt_ids[row]) + len(self.completion_ids[row])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a rollout as tensors on the card."""

    rows: tuple[int, ...]
    """Their indices in the rollout."""
    input_ids: torch.Tensor
    """Prompt and completion, right-padded; [B, T] int64."""
    positions: torch.Tensor
    """Where in the flattened [B * T] the hidden state that predicts each token lies; [N] int64."""
    targets: torch.Tensor
    """The predicted tokens; [N] int64."""
    slots: torch.Tensor
    """Where each token goes in the flattened [B * C]; [N] int64."""
    mask: torch.Tensor
    """1 at completion tokens; [B, C] float32."""

    def shape(self, chunk_tokens: int) -> Shape:
        """Return the values at which a footprint predicts this micro-batch."""
        rows, tokens = self.input_ids.shape
        return Shape(
            rows=rows,
            tokens=tokens,
            completion=self.mask.shape[1],
            chunk=min(chunk_tokens, rows * self.mask.shape[1]),
        )


def make_micro_batch(
    batch: RolloutBatch, rows: Sequence[int], *, pad_id: int, device: torch.device
) -> MicroBatch:
    """Return `rows` of `batch` as tensors on `device`, padded to the longest of them."""
    num_tokens = max(batch.row_tokens(row) for row in rows)
    num_completion = max(max(len(batch.completion_ids[row]) for row in rows), 1)
    input_ids = torch.full((len(rows), num_tokens), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(rows), num_completion)
    positions: list[int] = []
    targets: list[int] = []
    slots: list[int] = []
    for index, row in enumerate(rows):
        prompt, completion = batch.prompt_ids[row], batch.completion_ids[row]
        input_ids[index, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        mask[index, : len(completion)] = 1
        first = index * num_tokens + len(prompt) - 1
        positions.extend(range(first, first + len(completion)))
        targets.extend(completion)
        slots.extend(range(index * num_completion, index * num_completion + len(completion)))
    return MicroBatch(
        rows=tuple(rows),
        input_ids=input_ids.to(device),
        positions=torch.tensor(positions, dtype=torch.int64).to(device),
        targets=torch.tensor(targets, dtype=torch.int64).to(device),
        slots=torch.tensor(slots, dtype=torch.int64).to(device),
        mask=mask.to(device),
    )


def split_rows(batch: RolloutBatch, rows: Sequence[int], micro_batch: int) -> list[list[int]]:
    """Return `rows` in micro-batches, the longest rows first.

    Longest first: a step that cannot fit fails at once, and each micro-batch pads little.
    """
    ordered = sorted(rows, key=lambda row: (-batch.row_tokens(row), row))
    return [ordered[start : start + micro_batch] for start in range(0, len(ordered), micro_batch)]
