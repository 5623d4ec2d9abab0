"""The optimizer of a run, by where the plan keeps gradients and states: one face for both.

`ResidentEngine` keeps them on the card; `OffloadedEngine` hands them to the block engine.
"""

from __future__ import annotations

from typing import Protocol

from grpo_lite.offload.adamw import OffloadedAdamW
from grpo_lite.offload.resident import StepResult


class Engine(Protocol):
    """What the loop asks of an optimizer.

    Contract: `step` that raised is called again and goes on behind the last finished block;
    `zero_grad` throws away all gradients, wherever they lie.
    """

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use `learning_rate` from the next step on."""
        ...

    def step(self) -> StepResult:
        """Update every parameter once."""
        ...

    def zero_grad(self) -> None:
        """Free all gradients."""
        ...

    def close(self) -> None:
        """Give back files and memory."""
        ...


class OffloadedEngine:
    """Gradients and states in blocks off the card, in RAM and, with a folder, in files."""

    def __init__(self, optimizer: OffloadedAdamW) -> None:
        self._optimizer = optimizer

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use `learning_rate` from the next step on."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def step(self) -> StepResult:
        """Update block by block; resumes if it was interrupted."""
        self._optimizer.step()
        report = self._optimizer.last_step
        assert report is not None
        return StepResult(gradient_norm=report.gradient_norm, skipped=report.skipped)

    def zero_grad(self) -> None:
        """Throw away all gradients, in RAM and in files too."""
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Remove the block files and free the buffers."""
        self._optimizer.close()
