"""The step of somebody's optimizer, made block by block so that it can resume.

An out-of-memory in the middle of an optimizer's step leaves some parameters updated, and a retry
would update them twice.
Here the optimizer is shown few parameters at a time; what is done stays done, and what an
interrupted block had changed is put back before it is tried again.
Knows torch's own optimizers, whose parameters do not see each other; no others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_lite.cards.card import Card
from grpo_lite.errors import BudgetExceeded, UsageError
from grpo_lite.recovery import Rescue, collect, try_once
from grpo_lite.units import format_bytes

BLOCK_BYTES = 2**27
"""Parameter bytes that one call of the optimizer sees."""
LAST_TRIES = 3
"""Times that a block is tried before giving up."""
_COUPLED = ("LBFGS",)
"""Optimizers of torch whose parameters see each other."""


def known_optimizers() -> list[str]:
    """Return the names of the optimizers whose step can resume."""
    names = [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name not in _COUPLED
    ]
    return sorted([*names, "OffloadedAdamW"])


def can_resume(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step of `optimizer` can be made block by block, or resumes by itself."""
    kind = type(optimizer)
    if _resumes_by_itself(optimizer):
        return True
    return kind.__module__.startswith("torch.optim") and kind.__name__ not in _COUPLED


def require_resumable(optimizer: Any) -> None:
    """Check that the step of `optimizer` can resume.

    Raises:
        UsageError: it is none that is known; the known ones are listed.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not can_resume(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer whose step is known to resume; known: "
            + ", ".join(known_optimizers()),
            hint="torch.optim.AdamW(model.parameters(), lr=..., fused=True)",
        )


@dataclass(slots=True)
class ResumableStep:
    """One optimizer's step as a sequence of blocks; call it again to go on where it stopped."""

    optimizer: torch.optim.Optimizer
    """Whose parameters are updated."""
    card: Card
    """Where they live."""
    report: Callable[[Rescue, int], None]
    """Told of each out-of-memory and of how many blocks were done by then."""
    step_once: Callable[[], Any] | None = None
    """How one block is stepped; None: `optimizer.step`."""
    _done: int = 0

    @property
    def is_under_way(self) -> bool:
        """Whether some blocks are updated and others are not."""
        return self._done > 0

    def __call__(self) -> None:
        """Update each parameter once.

        Raises:
            BudgetExceeded: a block ran out of memory three times, with caches freed between;
                its parameters and states are as they were before it, those of others are done.
        """
        step_once = self.step_once or self.optimizer.step
        if _resumes_by_itself(self.optimizer):
            self._make(step_once)
            return
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for block in _blocks(whole)[self._done :]:
                for group, parameters in zip(groups, block, strict=True):
                    group["params"] = parameters
                self._make(functools.partial(self._step_block, block, step_once))
                self._done += 1
            self._done = 0
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _make(self, step: Callable[[], Any]) -> None:
        for tries in range(1, LAST_TRIES + 1):
            tried = try_once(self.card, step)
            if not isinstance(tried, Rescue):
                return
            collect(self.card)
            if tries == LAST_TRIES:
                raise self._out_of_moves(tried)
            self.report(tried, self._done)

    def _out_of_moves(self, rescue: Rescue) -> BudgetExceeded:
        asked_bytes = rescue.oom.asked_bytes
        wanted = "an allocation" if asked_bytes is None else f"another {format_bytes(asked_bytes)}"
        return BudgetExceeded(
            f"the optimizer's step needs {wanted} beside {format_bytes(rescue.allocated_bytes)} in "
            f"a budget of {format_bytes(self.card.budget_bytes)}; {self._done} blocks are done "
            "and kept",
            hint="OffloadedAdamW keeps optimizer state in RAM",
        )

    def _step_block(self, block: Sequence[list[torch.Tensor]], step: Callable[[], Any]) -> None:
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        parameters = [parameter for group in block for parameter in group]
        undo = [self._remember(parameter, values=not fused) for parameter in parameters]
        finished = False
        try:
            step()
            finished = True
        finally:
            if not finished:
                for put_back in undo:
                    put_back()

    def _remember(self, parameter: torch.Tensor, *, values: bool) -> Callable[[], None]:
        """Return what puts `parameter` and its state back as they are now.

        A fused step allocates nothing once its state exists, so only new state is thrown away;
        any other step may stop half way through a parameter: `values` are kept on the host.
        """
        state = self.optimizer.state
        kept = dict(state[parameter]) if parameter in state else {}
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        if values:
            tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)]
            held = [(tensor, self._host_copy(tensor)) for tensor in [parameter, *tensors]]

        def put_back() -> None:
            state.pop(parameter, None)
            if kept:
                state[parameter] = kept
            with torch.no_grad():
                for tensor, copy in held:
                    tensor.copy_(copy)

        return put_back

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            copy = self.card.empty_host(tensor.numel(), tensor.dtype).view(tensor.shape)
            return copy.copy_(tensor)


def _resumes_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    from grpo_lite.offload.adamw import OffloadedAdamW

    return isinstance(optimizer, OffloadedAdamW)


def _blocks(groups: Sequence[list[torch.Tensor]]) -> list[list[list[torch.Tensor]]]:
    """Return the parameters of all groups in blocks: for each block, the parameters per group.

    A block has parameters of one group: an optimizer makes the states of a group before it
    changes any of its parameters, but after it has changed those of the group before.
    """
    blocks: list[list[list[torch.Tensor]]] = []
    for index, group in enumerate(groups):
        filled_bytes = BLOCK_BYTES
        for parameter in group:
            num_bytes = parameter.numel() * parameter.element_size()
            if filled_bytes + num_bytes > BLOCK_BYTES:
                blocks.append([[] for _ in groups])
                filled_bytes = 0
            blocks[-1][index].append(parameter)
            filled_bytes += num_bytes
    return blocks
