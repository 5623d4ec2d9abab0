"""A card that is a byte budget over CPU tensors, real or fake.

Raises the genuine `torch.OutOfMemoryError` at the operation that breaks the budget, so that
everything that must survive on a GPU can be tested and rehearsed without one.
The failing tensor is thrown away before it is counted: the peak never exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from grpo_lite.cards.card import OutOfMemory
from grpo_lite.cards.ledger import StorageLedger


class VirtualCard:
    """A `Card` (see `card.Card` for the contract) made of CPU memory and a ledger."""

    def __init__(self, budget_bytes: int, *, name: str | None = None) -> None:
        self.name = name or f"virtual:{budget_bytes}"
        self.device = torch.device("cpu")
        self.ledger = StorageLedger(budget_bytes=budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """Bytes that may be alive at once."""
        assert self.ledger.budget_bytes is not None
        return self.ledger.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, num_bytes: int) -> None:
        self.ledger.budget_bytes = num_bytes

    def attach(self) -> AbstractContextManager[None]:
        """Count what the calling thread allocates while inside."""
        return self.ledger.attach()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors made outside `attach()`; `torch.OutOfMemoryError` beyond the budget."""
        for tensor in tensors:
            self.ledger.admit(tensor)

    def allocated_bytes(self) -> int:
        """Return the bytes of tensor storages alive now."""
        return self.ledger.allocated_bytes

    def free_bytes(self) -> int:
        """Return what is left of the budget; 0 where it was lowered below what is alive."""
        return max(0, self.budget_bytes - self.allocated_bytes())

    def peak_bytes(self) -> int:
        """Return the largest `allocated_bytes` since `reset_peak`."""
        return self.ledger.peak_bytes

    def reserved_peak_bytes(self) -> int | None:
        """Return None: a ledger has no caching allocator."""
        return None

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.ledger.reset_peak()

    def release_cached(self) -> None:
        """Do nothing: a ledger caches nothing."""

    def read_oom(self, error: BaseException) -> OutOfMemory | None:
        """Return by how much the budget was broken; None for any other error."""
        if not isinstance(error, torch.OutOfMemoryError):
            return None
        asked_bytes = getattr(error, "asked_bytes", None)
        free_bytes = getattr(error, "free_bytes", 0)
        return OutOfMemory(
            asked_bytes=asked_bytes, shortfall_bytes=max(1, (asked_bytes or 1) - free_bytes)
        )

    def empty_host(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor that counts as host memory; shape [num_elements]."""
        with _disable_current_modes():
            tensor = torch.empty(num_elements, dtype=dtype)
        self.ledger.admit_host(tensor)
        return tensor
