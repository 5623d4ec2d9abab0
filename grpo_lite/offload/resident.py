"""Optimizer state that stays on the card, stepped block by block so that a step can resume.

An out-of-memory in the middle of an optimizer's step leaves some parameters updated; a plain retry
would update them twice.
Here each block is recorded as done, and a repeated call goes on where the last one stopped.
A block is whole or not at all: what an interrupted one has changed is put back, by the way in
which its optimizer allocates (see `_step_block`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from grpo_lite.optimizers import BLOCK_BYTES, OptimizerRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    gradient_norm: float
    """Global L2 norm before clipping."""
    skipped: bool
    """Whether the gradients were not finite, so that nothing was changed."""


class ResidentEngine:
    """Gradients and optimizer state of `parameters`, all on the card."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        row: OptimizerRow,
        *,
        learning_rate: float,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.max_grad_norm = max_grad_norm
        module, _, name = row.constructor.partition(":")
        make = getattr(importlib.import_module(module), name)
        arguments = dict(row.arguments)
        # bitsandbytes makes the state of one tensor after it has updated the one before.
        block_bytes = BLOCK_BYTES if row.block_size is None else 0
        self._blocks = [
            make(block, lr=learning_rate, weight_decay=weight_decay, **arguments)
            for block in _blocks(self.parameters, block_bytes)
        ]
        self._makes_temporaries = row.makes_temporaries
        self._done: set[int] = set()
        self._clipped: set[int] = set()
        self._with_states: set[int] = set()
        self._norm: float | None = None

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use `learning_rate` from the next step on."""
        for optimizer in self._blocks:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

    def step(self) -> StepResult:
        """Clip by the global norm and update each block once.

        If an exception ends it, the next call resumes behind the last finished block.
        Non-finite gradients change nothing.
        """
        if self._norm is None:
            self._norm = self._gradient_norm()
        norm = self._norm
        if not math.isfinite(norm):
            self._norm = None
            return StepResult(gradient_norm=norm, skipped=True)
        for index, optimizer in enumerate(self._blocks):
            if index in self._done:
                continue
            if index not in self._clipped:
                self._clip(optimizer, norm)
                self._clipped.add(index)
            self._step_block(index, optimizer)
            self._done.add(index)
        self._done.clear()
        self._clipped.clear()
        self._norm = None
        return StepResult(gradient_norm=norm, skipped=False)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Do nothing: all of it is the card's and goes with it."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the optimizer state of each block."""
        return [optimizer.state_dict() for optimizer in self._blocks]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        for optimizer, state in zip(self._blocks, states, strict=True):
            optimizer.load_state_dict(state)
        self._with_states = set(range(len(self._blocks)))

    def _step_block(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        """Update one block, whole or not at all.

        Optimizers make the states of all tensors of a block before they update the first, in the
        first step only. If memory ends in between, they leave states that lack a part, which they
        would later take for whole: they are thrown away, and made again when the step resumes.
        Those that make temporaries can also stop after they have changed moments and weights, in
        any step: what was there before is kept on the host and put back.
        """
        put_back = _remember(optimizer) if self._makes_temporaries else None
        try:
            optimizer.step()
        except Exception:
            if put_back is not None:
                put_back()
            if index not in self._with_states:
                optimizer.state.clear()
            raise
        self._with_states.add(index)

    def _gradient_norm(self) -> float:
        """Return the global L2 norm, summed in fp64 over per-tensor fp32 norms."""
        squares = [
            float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)) ** 2
            for parameter in self.parameters
            if parameter.grad is not None
        ]
        return math.sqrt(sum(squares))

    def _clip(self, optimizer: torch.optim.Optimizer, norm: float) -> None:
        if self.max_grad_norm is None or norm <= self.max_grad_norm:
            return
        scale = self.max_grad_norm / (norm + 1e-6)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)


def _remember(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what puts the weights and states of `optimizer` back as they are now.

    The copies lie on the host, out of sight of a virtual card: its bytes are not the host's.
    """
    held = [
        *(parameter for group in optimizer.param_groups for parameter in group["params"]),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    with _disable_current_modes(), torch.no_grad():
        copies = [(t, t.detach().to("cpu", copy=True)) for t in held if isinstance(t, torch.Tensor)]

    def put_back() -> None:
        with _disable_current_modes(), torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)

    return put_back


def _blocks(
    parameters: Sequence[torch.nn.Parameter], block_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """Return `parameters` in runs of at most `block_bytes` of gradient; a larger one is alone."""
    blocks: list[list[torch.nn.Parameter]] = []
    filled_bytes = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if not blocks or filled_bytes + num_bytes > block_bytes:
            blocks.append([])
            filled_bytes = 0
        blocks[-1].append(parameter)
        filled_bytes += num_bytes
    return blocks
