"""Batches of any loop as rows: counted, cut and joined; and a loss that is what it must be.

Knows tensors and containers of them; nothing of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from grpo_lite.errors import UsageError


def count_rows(batch: Any) -> int:
    """Return the rows of `batch`.

    Raises:
        UsageError: it has none, or its columns disagree.
    """
    counts = {name: len(column) for name, column in _columns(batch).items()}
    if not counts or not all(counts.values()):
        raise UsageError(
            "the batch has no rows",
            hint="a tensor, a mapping or tuple of tensors whose first dimension is the rows, "
            "or a list of rows",
        )
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UsageError(f"the batch's columns disagree in their number of rows: {listed}")
    return next(iter(counts.values()))


def row_size(batch: Any, num_rows: int) -> int:
    """Return the tensor elements of one of `num_rows` rows, padding included; at least 1."""
    elements = sum(
        column.numel() for column in _columns(batch).values() if isinstance(column, torch.Tensor)
    )
    return max(1, elements // num_rows)


def take_rows(batch: Any, rows: range) -> Any:
    """Return `rows` of `batch` in its own form; what has no rows is passed on as it is."""
    cut = slice(rows.start, rows.stop)
    if isinstance(batch, Mapping):
        return {name: value[cut] if _is_column(value) else value for name, value in batch.items()}
    if _is_tuple_of_columns(batch):
        return tuple(value[cut] for value in batch)
    return batch[cut]


def join(parts: Sequence[Any]) -> Any:
    """Return results of parts as one: tensors and lists end to end, mappings name by name."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: join([part[name] for part in parts]) for name in first}
    if _is_tuple_of_columns(first):
        return tuple(join([part[index] for part in parts]) for index in range(len(first)))
    return [row for part in parts for row in part]


@dataclass(slots=True)
class LossGuard:
    """Calls loss functions and refuses what would make a split update another update."""

    _is_checked: bool = False

    def call(
        self,
        loss_fn: Callable[[Any], Any],
        batch: Any,
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss of `batch`.

        Raises:
            UsageError: it is no scalar, has no gradient, does not look at the batch (checked once)
                or came with changed parameters.
        """
        versions = [parameter._version for parameter in parameters]
        if self._is_checked:
            loss = loss_fn(batch)
        else:
            watch = _Touched(batch)
            with watch:
                loss = loss_fn(batch)
            _require_scalar(loss)
            if watch.tensors and not watch.is_touched:
                raise UsageError(
                    "the loss does not depend on the batch that it was given",
                    hint="use the argument of the loss function: it holds some rows of the batch",
                )
            self._is_checked = True
        _require_scalar(loss)
        if versions != [parameter._version for parameter in parameters]:
            raise UsageError(
                "the loss function changed parameters: after an out-of-memory it is called again, "
                "and they would be changed twice",
                hint="leave all updates to the optimizer",
            )
        return loss  # type: ignore[no-any-return]  # checked above


def _require_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"the loss must be a scalar tensor; it is {shape}", hint="loss.mean()")
    if not loss.requires_grad:
        raise UsageError(
            "the loss depends on no parameter that is trained",
            hint="no .detach(), .item() or torch.no_grad() between the model and its loss",
        )


class _Touched(TorchFunctionMode):
    """Notes whether any tensor of a batch is an argument of an operation."""

    def __init__(self, batch: Any) -> None:
        self.tensors = {
            id(column) for column in _columns(batch).values() if isinstance(column, torch.Tensor)
        }
        self.is_touched = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments and run `func`."""
        self._look(args)
        self._look((kwargs or {}).values())
        return func(*args, **(kwargs or {}))

    def _look(self, values: Any) -> None:
        for value in values:
            if isinstance(value, list | tuple):
                self._look(value)
            elif id(value) in self.tensors:
                self.is_touched = True


def _columns(batch: Any) -> dict[str, Any]:
    """Return what of `batch` has rows, by name."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items() if _is_column(value)}
    if _is_tuple_of_columns(batch):
        return {f"part {index}": value for index, value in enumerate(batch)}
    return {"batch": batch} if _is_column(batch) else {}


def _is_column(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_tuple_of_columns(value: Any) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) > 0
    return is_pair and all(isinstance(part, torch.Tensor) and part.ndim > 0 for part in value)
