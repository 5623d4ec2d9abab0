"""The records of a step: the numbers it works with, how far it is, what it did.

Pure data; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """The numbers of AdamW for one parameter, as torch names them."""

    lr: float
    """Learning rate."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    weight_decay: float
    """Decoupled weight decay."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """A step that has begun: what it was begun with, and what is left of it."""

    remaining: list[int]
    """Blocks that are not updated yet, in the order of the sweep."""
    settings: Sequence[AdamWSettings]
    """By parameter."""
    num_updates: dict[int, int]
    """Updates of each parameter that has a gradient, this one included."""
    gradient_norm: float
    """Global L2 norm before clipping."""
    gradient_divisor: float | None
    """What gradients are divided by; None: nothing."""
    wait_s: float = 0.0
    """Seconds of waiting for blocks so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did."""

    step: int
    """Steps taken so far, this one and skipped ones included."""
    gradient_norm: float
    """Global L2 norm before clipping."""
    gradient_divisor: float | None
    """What every gradient was divided by to clip it, exact in fp32; None: not clipped."""
    skipped: bool
    """Whether gradients were not finite, so that nothing was changed."""
    step_s: float
    """Seconds that the step took, those of an interrupted part not counted."""
    wait_s: float
    """Of these, seconds of waiting for blocks to be read or written."""
    read_bytes: int
    """Bytes read from disk since the last step, gradients included."""
    written_bytes: int
    """Bytes written to disk since the last step, gradients included."""
