"""What a card is: a protocol with few members, and the bytes that a run may use.

The contract below is kept by `CudaCard` and `VirtualCard` and tested by one suite over both.
Imports torch for types only, so that planning costs no torch import.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that this run may use, after what others hold and after reserves."""

    card_bytes: int
    """For torch's allocator on the card: allocated peaks are held against this."""
    total_bytes: int
    """What torch sees of the card."""
    runtime_bytes: int = 0
    """Held outside the allocator: context and loaded kernels."""
    held_by_others_bytes: int = 0
    """Held by other processes: desktop, browser."""
    reserve_bytes: int = 0
    """Kept free because the user asked for it."""
    uncertainty_fraction: float = 0.03
    """How far a true peak may lie above the prediction on this card, as a share of it."""
    host_bytes: int | None = None
    """RAM for blocks and loading; None: not limited by this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """What an out-of-memory error says, in bytes."""

    asked_bytes: int | None
    """The allocation that failed; None where the error does not say."""
    shortfall_bytes: int
    """How much was missing, as far as it is known; at least 1."""


class Card(Protocol):
    """One accelerator, or a byte budget that acts as one.

    Contract:
        Bytes counted are those of tensor storages on the card, whole and once each.
        An allocation beyond the budget raises the genuine `torch.OutOfMemoryError` inside the
        operation that asked for it and leaves every count as it was.
        Counts may be read at any time from any thread; a thread whose tensors are to be counted
        works inside `attach()`.
        Memory of `empty_host` belongs to the host and never counts as the card's.
    """

    name: str
    """Profile name, or "virtual:BYTES"."""
    device: torch.device
    """Where tensors of this card are made."""
    budget_bytes: int
    """Bytes of tensors that may be alive at once; a virtual card's may be set during a run."""

    def attach(self) -> AbstractContextManager[None]:
        """Count what the calling thread allocates while inside; entering twice counts once."""
        ...

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that came to be outside `attach()`, such as loaded weights."""
        ...

    def allocated_bytes(self) -> int:
        """Return the bytes of tensor storages alive now."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated now, whoever else uses the card."""
        ...

    def peak_bytes(self) -> int:
        """Return the largest `allocated_bytes` since `reset_peak`."""
        ...

    def reserved_peak_bytes(self) -> int | None:
        """Return the allocator's largest reservation since `reset_peak`; None where it has none."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        ...

    def release_cached(self) -> None:
        """Give cached, unused memory back to the driver."""
        ...

    def read_oom(self, error: BaseException) -> OutOfMemory | None:
        """Return what `error` says of this card's memory; None if it is no out-of-memory error."""
        ...

    def empty_host(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat host tensor, pinned where the card can use it; shape [num_elements]."""
        ...
