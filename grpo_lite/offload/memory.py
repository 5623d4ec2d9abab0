"""Host memory for blocks and buffers, pinned or pageable, beginning on a page where asked.

On a card that is a byte budget, host memory comes from the card so that it is counted apart.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from grpo_lite.cards.virtual import VirtualCard
from grpo_lite.offload.placement import PAGE_BYTES
from grpo_lite.units import format_bytes

if TYPE_CHECKING:
    from grpo_lite.cards.card import Card

logger = logging.getLogger(__name__)


class HostMemory:
    """Allocates host tensors and counts what it has handed out."""

    def __init__(self, card: Card | None = None) -> None:
        self._card = card
        self.allocated_bytes = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pageable host memory of `num_elements`, not initialised."""
        self.allocated_bytes += num_elements * dtype.itemsize
        if self._card is not None and self._card.device.type == "cpu":
            return self._card.empty_host(num_elements, dtype)
        return torch.empty(num_elements, dtype=dtype, device="cpu")

    def record(self, num_bytes: int) -> torch.Tensor:
        """Return `num_bytes` of pageable memory that begins on a page; dtype uint8.

        A page more is allocated: torch aligns to 64 bytes, and direct I/O refuses that.
        """
        memory = self.empty(num_bytes + PAGE_BYTES, torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + num_bytes]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked memory, or pageable memory with one warning where the system refuses.

        Only small rings are pinned: torch pins by powers of two, and WSL2 and containers cap it.
        """
        self.allocated_bytes += num_bytes
        if self._card is not None:
            memory = self._card.empty_host(num_bytes, torch.uint8)
        else:
            memory = _pinned_or_pageable(num_bytes)
        if torch.cuda.is_available() and not memory.is_pinned():
            logger.warning(
                "the system refused to pin %s; copies to and from the card are not overlapped",
                format_bytes(num_bytes),
            )
        return memory

    def map_file(self, path: Path, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes` of a file, read when touched; writes to it stay private."""
        with _disable_current_modes():
            mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
        if isinstance(self._card, VirtualCard):
            self._card.ledger.admit_host(mapped)
        return mapped


def _pinned_or_pageable(num_bytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the caller warns
            pass
    return torch.empty(num_bytes, dtype=torch.uint8)
