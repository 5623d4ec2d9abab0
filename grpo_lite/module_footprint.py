"""What any module keeps in memory for one forward and backward, found on fake tensors.

No weight is copied and no GPU is needed; the module itself is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from grpo_lite.cards.ledger import StorageLedger
from grpo_lite.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFootprint:
    """Bytes of one forward and backward of a module, at the shapes of the example."""

    parameter_bytes: int
    """Parameters and buffers, tied ones once."""
    gradient_bytes: int
    """Gradients that the backward leaves."""
    forward_bytes: int
    """Peak of the forward beyond parameters: activations that backward needs, and temporaries."""
    backward_bytes: int
    """Peak of the backward beyond parameters, gradients included."""

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once, parameters included."""
        return self.parameter_bytes + max(self.forward_bytes, self.backward_bytes)


def footprint(module: torch.nn.Module, example_inputs: Any) -> ModuleFootprint:
    """Return what `module` keeps for `example_inputs`: a tensor, a tuple, or keyword arguments.

    >>> import torch
    >>> found = footprint(torch.nn.Linear(4, 3, bias=False), torch.ones(2, 4))
    >>> found.parameter_bytes, found.gradient_bytes
    (48, 48)

    Raises:
        UsageError: the module's output has no gradient, or it looks at the values of its inputs.
    """
    mode = FakeTensorMode()
    weights: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    fakes: dict[int, torch.Tensor] = {}
    for tensor in weights.values():
        if id(tensor) not in fakes:
            fakes[id(tensor)] = mode.from_tensor(tensor)
    inputs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, example_inputs)
    arguments, keywords = _call_form(inputs)
    ledger = StorageLedger()
    given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    for tensor in (*fakes.values(), *given):
        ledger.admit(tensor)
    resting_bytes = ledger.allocated_bytes
    named = {name: fakes[id(tensor)] for name, tensor in weights.items()}
    try:
        with mode, ledger.attach():
            ledger.reset_peak()
            output = torch.func.functional_call(module, named, arguments, keywords)
            forward_bytes = ledger.peak_bytes - resting_bytes
            loss = _total(output)
            ledger.reset_peak()
            loss.backward()
            backward_bytes = ledger.peak_bytes - resting_bytes
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        raise UsageError(
            f"{type(module).__name__} looks at the values of its inputs ({error}); without data "
            "its memory cannot be told"
        ) from error
    gradients = [fake.grad for fake in fakes.values() if fake.grad is not None]
    return ModuleFootprint(
        parameter_bytes=_bytes(list(fakes.values())),
        gradient_bytes=_bytes(gradients),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
    )


def _call_form(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence):
        return tuple(inputs), {}
    return (inputs,), {}


def _total(output: Any) -> torch.Tensor:
    """Return the sum of all outputs that have a gradient."""
    values = output.values() if isinstance(output, Mapping) else output
    leaves = pytree.tree_leaves(list(values) if isinstance(output, Mapping) else values)
    sums = [
        leaf.float().sum()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not sums:
        raise UsageError("the module's output has no gradient; nothing of it can be trained")
    return torch.stack(sums).sum()


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
