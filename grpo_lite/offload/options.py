"""Where a block engine may put things, and the store that its gradients spill to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lite.offload.blocks import Layout
from grpo_lite.offload.disk import DiskSettings, DiskStore
from grpo_lite.offload.memory import HostMemory
from grpo_lite.offload.placement import GRADIENT_BUFFERS

if TYPE_CHECKING:
    from grpo_lite.cards.card import Card


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Where the engine may put things."""

    card: Card | None = None
    """Gives host memory and counts the card's; None: plain torch."""
    disk_dir: Path | None = None
    """Folder of the disk tier."""
    disk_settings: DiskSettings = field(default_factory=DiskSettings)
    """How the disk tier works."""
    in_flight_bytes: int = 0
    """Gradients on a CUDA card that may wait to be copied."""
    max_grad_norm: float | None = None
    """Global norm to clip to; None: no clipping."""
    max_disk_write_bytes: int | None = None
    """Endurance budget of this run; None: no limit."""


def open_gradient_store(
    options: EngineOptions, layout: Layout, memory: HostMemory, sizes: Mapping[int, int]
) -> DiskStore:
    """Return a store of gradient records of `sizes`: scratch, so one slot each, never resumed."""
    assert options.disk_dir is not None, "a placement on disk needs a folder"
    return DiskStore(
        options.disk_dir,
        sizes,
        memory,
        settings=DiskSettings(
            num_buffers=GRADIENT_BUFFERS,
            num_slots=1,
            largest_bytes=max(block.accumulator_bytes for block in layout.blocks),
            folder="grpo-lite-gradients",
            io=options.disk_settings.io,
        ),
    )
