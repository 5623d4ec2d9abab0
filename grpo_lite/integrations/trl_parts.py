"""What it takes to cut TRL's GRPO step without changing it: weights, columns, metrics and noise.

Knows TRL's words and none of its code; `integrations.trl` applies it.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from grpo_lite.errors import UsageError
from grpo_lite.recovery import RandomState, random_state, restore_random_state

BY_ROWS = ("grpo", "sapo", "luspo", "dr_grpo")
"""Losses that are a mean over the rows of a micro-batch, or a sum divided by their number."""
BY_TOKENS = ("bnpo",)
"""Losses that are a mean over the tokens of a micro-batch."""
AS_SUM = ("dapo", "cispo", "vespo")
"""Losses that are divided by the tokens of the generation batch: parts add up as they are."""
ROW_COLUMNS = frozenset(
    {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
        "tool_mask",
    }
)
"""Tensors of a micro-batch whose first dimension is the rows."""
SHARED = frozenset({"num_items_in_batch"})
"""What every part keeps as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some rows of a micro-batch and what their loss counts."""

    inputs: dict[str, Any]
    """TRL's inputs, cut to these rows."""
    loss_weight: float
    """Factor of the loss that TRL computes for these rows alone."""
    token_fraction: float
    """Their share of the micro-batch's loss tokens."""
    row_fraction: float
    """Their share of the micro-batch's rows."""
    is_last: bool
    """Whether the micro-batch ends with them."""


def require_splittable(inputs: Mapping[str, Any]) -> None:
    """Check that `inputs` can be cut into rows.

    Raises:
        UsageError: they hold something whose rows are not known, such as images.
    """
    unknown = sorted(set(inputs) - ROW_COLUMNS - SHARED)
    if unknown:
        raise UsageError(
            f"a micro-batch of TRL holds {', '.join(unknown)}, which cannot be cut into rows",
            hint="the governor splits text only; per_device_train_batch_size=1 for images",
        )


def loss_tokens(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the number of loss tokens of each row, on the host; [B]."""
    mask: torch.Tensor = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    return mask.sum(1).cpu().double()


def make_part(inputs: Mapping[str, Any], rows: range, loss_type: str, tokens: torch.Tensor) -> Part:
    """Return `rows` of a micro-batch; `tokens` [B] as from `loss_tokens`.

    Raises:
        UsageError: `loss_type` is none whose weights are known.
    """
    num_rows = len(tokens)
    cut = slice(rows.start, rows.stop)
    whole = len(rows) == num_rows
    total = max(1.0, float(tokens.sum()))
    token_fraction = max(1.0, float(tokens[cut].sum())) / total
    row_fraction = len(rows) / num_rows
    return Part(
        inputs=dict(inputs)
        if whole
        else {name: value if name in SHARED else value[cut] for name, value in inputs.items()},
        loss_weight=1.0 if whole else loss_weight(loss_type, row_fraction, token_fraction),
        token_fraction=token_fraction,
        row_fraction=row_fraction,
        is_last=rows.stop == num_rows,
    )


def loss_weight(loss_type: str, row_fraction: float, token_fraction: float) -> float:
    """Return the factor with which the losses of parts add up to the micro-batch's.

    Source: the normalisers in TRL 1.15-1.16, `GRPOTrainer._compute_loss`.

    Raises:
        UsageError: `loss_type` is none of theirs.
    """
    if loss_type in BY_ROWS:
        return row_fraction
    if loss_type in BY_TOKENS:
        return token_fraction
    if loss_type in AS_SUM:
        return 1.0
    known = ", ".join((*BY_ROWS, *BY_TOKENS, *AS_SUM))
    raise UsageError(f"loss_type {loss_type!r} cannot be split; known: {known}")


def merge_metrics(
    metrics: dict[str, list[float]], before: Mapping[str, int], parts: Sequence[Part]
) -> None:
    """Replace what each part has appended to `metrics` by one value for the micro-batch.

    `before`: lengths of the lists when the micro-batch began.
    """
    if len(parts) < 2:
        return
    for name, values in metrics.items():
        start = before.get(name, 0)
        added = values[start:]
        if len(added) == len(parts):
            values[start:] = [_merged(name, added, parts)]


def _merged(name: str, values: Sequence[float], parts: Sequence[Part]) -> float:
    known = [(v, part) for v, part in zip(values, parts, strict=True) if not math.isnan(v)]
    if not known:
        return math.nan
    if name.endswith("_min"):
        return min(value for value, _ in known)
    if name.endswith("_max"):
        return max(value for value, _ in known)
    if name == "policy_loss":
        return sum(value * part.loss_weight for value, part in known)
    total = sum(part.token_fraction for _, part in known)
    return sum(value * part.token_fraction for value, part in known) / total


class RowNoise(TorchFunctionMode):
    """Lets some rows of a rollout draw what they would have drawn among all of them.

    `torch.multinomial` of one sample takes the largest of probability / noise, with exponential
    noise for each row and token of the vocabulary (ATen/native/Distributions.cpp).
    Here the noise of all `num_rows` rows is drawn, in the order of the whole rollout, and the
    rows at work take theirs.
    """

    def __init__(self, rows: range, num_rows: int) -> None:
        self._rows = slice(rows.start, rows.stop)
        self._num_rows = num_rows
        self.num_draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw for `torch.multinomial`; run anything else as it is."""
        if func is not torch.multinomial:
            return func(*args, **(kwargs or {}))
        probabilities = args[0]
        self.num_draws += 1
        noise = probabilities.new_empty(self._num_rows, probabilities.shape[1]).exponential_(1)
        return (probabilities / noise[self._rows]).argmax(-1, keepdim=True)


@dataclass(slots=True)
class Memo:
    """Remembers the finished calls of one rollout, so that running it again does not repeat them.

    Sampling and rewards cost most, and rewards may have effects of their own.
    """

    device: torch.device
    """Whose random state belongs to the results."""
    results: list[tuple[Any, RandomState, Any]] = field(default_factory=list)
    """Of each call: what it returned, the random state after it, and the logs after it."""
    cursor: int = 0
    """The next call."""

    def call(self, function: Callable[[], Any], trainer: Any) -> Any:
        """Return `function()`, or what it returned in an earlier run."""
        if self.cursor == len(self.results):
            result = function()
            self.results.append((result, random_state(self.device), pending_logs(trainer)))
        result, state, logs = self.results[self.cursor]
        restore_random_state(self.device, state)
        for name, value in logs.items():
            setattr(trainer, name, copy_logs(value))
        self.cursor += 1
        return result


def pending_logs(trainer: Any) -> dict[str, Any]:
    """Return what reward functions have logged and TRL has not taken up yet."""
    names = ("_pending_extra_logs", "_pending_metrics")
    return {name: copy_logs(getattr(trainer, name)) for name in names if hasattr(trainer, name)}


def copy_logs(value: Any) -> Any:
    """Return a copy of nested mappings, lists and deques; their leaves are shared."""
    if isinstance(value, dict):
        other = copy.copy(value)
        for key, item in value.items():
            other[key] = copy_logs(item)
        return other
    return copy.copy(value) if isinstance(value, list | deque) else value
