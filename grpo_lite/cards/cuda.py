"""The same contract on `torch.cuda`: peaks from the caching allocator, a limit by memory fraction.

Knows CUDA's two ways of saying "out of memory" and nothing of plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from grpo_lite.cards.card import OutOfMemory
from grpo_lite.units import parse_bytes

_OOM_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What drivers and cuBLAS say when memory ends outside torch's allocator."""


class CudaCard:
    """A `Card` (see `card.Card` for the contract) that is a CUDA device."""

    def __init__(self, index: int = 0, *, budget_bytes: int | None = None) -> None:
        """Open CUDA device `index`; `budget_bytes` limits torch's allocator, None does not."""
        properties = torch.cuda.get_device_properties(index)
        self.name = properties.name
        self.device = torch.device("cuda", index)
        self.total_bytes = properties.total_memory
        self.budget_bytes = budget_bytes if budget_bytes is not None else self.total_bytes
        if budget_bytes is not None:
            fraction = min(1.0, budget_bytes / self.total_bytes)
            torch.cuda.set_per_process_memory_fraction(fraction, index)

    def attach(self) -> AbstractContextManager[None]:
        """Make the device current; the allocator counts every thread by itself."""
        return nullcontext()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that `tensors` lie on this card; the allocator has counted them already."""
        for tensor in tensors:
            assert tensor.device == self.device, f"{tensor.device} is not {self.device}"

    def allocated_bytes(self) -> int:
        """Return the bytes of tensor storages alive now."""
        return torch.cuda.memory_allocated(self.device)

    def free_bytes(self) -> int:
        """Return what the driver has free and the allocator has cached, within the budget."""
        allocated_bytes = self.allocated_bytes()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        cached_bytes = torch.cuda.memory_reserved(self.device) - allocated_bytes
        return max(0, min(free_bytes + cached_bytes, self.budget_bytes - allocated_bytes))

    def peak_bytes(self) -> int:
        """Return the largest `allocated_bytes` since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reserved_peak_bytes(self) -> int | None:
        """Return the allocator's largest reservation since `reset_peak`."""
        return torch.cuda.max_memory_reserved(self.device)

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_cached(self) -> None:
        """Give cached, unused memory back to the driver."""
        torch.cuda.empty_cache()

    def read_oom(self, error: BaseException) -> OutOfMemory | None:
        """Return what torch, the driver or cuBLAS say is missing; None for any other error."""
        if not isinstance(error, RuntimeError):
            return None
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and not any(t in text for t in _OOM_TEXTS):
            return None
        asked = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", text)
        if asked is None:
            return OutOfMemory(asked_bytes=None, shortfall_bytes=1)
        asked_bytes = parse_bytes(asked.group(1))
        free_bytes = self.budget_bytes - self.allocated_bytes()
        return OutOfMemory(
            asked_bytes=asked_bytes, shortfall_bytes=max(1, asked_bytes - max(0, free_bytes))
        )

    def empty_host(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat pinned host tensor, pageable where pinning fails; shape [num_elements]."""
        try:
            return torch.empty(num_elements, dtype=dtype, pin_memory=True)
        except RuntimeError:  # WSL2 and containers cap page-locked memory
            return torch.empty(num_elements, dtype=dtype)
