"""A model as fake tensors: built on the meta device, adapters added, then made fake with ties kept.

Nothing is allocated and no weight is read; only the installed transformers and peft run.
peft cannot inject adapters under fake tensors (it swaps Linear.weight), hence the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_lite.errors import UsageError
from grpo_lite.grpo.policy import add_adapters, prepare_policy, weights_dtype
from grpo_lite.plan import Workload
from grpo_lite.predict.footprint import Weights
from grpo_lite.trace.quantised import quantise


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A model whose tensors have shapes, dtypes and ties, and no data."""

    model: Any
    """The causal language model, adapters included."""
    layers: tuple[torch.nn.Module, ...]
    """Its decoder layers in order."""
    mode: FakeTensorMode
    """Where its tensors live."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers, tied ones once."""
        return [*self.model.parameters(), *self.model.buffers()]

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        """Parameters with gradient, tied ones once."""
        return [p for p in self.model.parameters() if p.requires_grad]


def build_config(config: dict[str, Any]) -> Any:
    """Return the transformers config of `config` (the content of a config.json).

    Raises:
        UsageError: transformers does not know the model type or refuses a field.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type", "")
    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"the installed transformers does not know model_type {model_type!r}",
            hint="pip install --upgrade transformers",
        )
    fields = {key: value for key, value in config.items() if key != "auto_map"}
    try:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"the installed transformers cannot read this config of model_type {model_type!r}: "
            f"{error}"
        ) from error


def shorten(config: Any, num_layers: int) -> Any:
    """Return a copy of the transformers `config` with its first `num_layers` layers."""
    short = type(config).from_dict(config.to_dict())
    depth = config.num_hidden_layers
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth and name != "architectures":
            setattr(short, name, value[:num_layers])
    short.num_hidden_layers = num_layers
    short._attn_implementation = config._attn_implementation
    return short


def layer_period(config: Any) -> int:
    """Return after how many layers the kinds of layers repeat; the depth where they do not."""
    kinds = list(getattr(config, "layer_types", None) or [])
    depth: int = config.num_hidden_layers
    if len(kinds) != depth:
        return 1
    for period in range(1, depth + 1):
        if all(kinds[i] == kinds[i - period] for i in range(period, depth)):
            return period
    return depth


def build_meta(config: Any, workload: Workload) -> Any:
    """Return the model of the transformers `config` on the meta device, adapters included."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        dtype = weights_dtype(workload)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if workload.method == "qlora":
            quantise(model, compute_dtype=dtype, double_quantised=True)
        model = add_adapters(model, workload)
    prepare_policy(model, workload)
    return model


def build_fake(config: Any, workload: Workload) -> FakeModel:
    """Return the model of the transformers `config` as `train` would have it for `workload`."""
    model = build_meta(config, workload)
    mode = FakeTensorMode()
    materialise(model, mode)
    return FakeModel(model=model, layers=find_layers(model, config), mode=mode)


def find_layers(model: torch.nn.Module, config: Any) -> tuple[torch.nn.Module, ...]:
    """Return the decoder layers of `model`: its list of modules that is as long as it is deep.

    Raises:
        UsageError: there is none, so that the trace could not tell the layers apart.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers:
            return tuple(module)
    raise UsageError(
        f"model_type {config.model_type!r} has no list of {config.num_hidden_layers} decoder "
        "layers; it cannot be traced layer by layer"
    )


def measure_weights(model: torch.nn.Module) -> Weights:
    """Return the static bytes of `model`, tied parameters once, as it lies on the card."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tensors = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in parameters}
    tensors |= {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    return Weights(
        # A packed byte is two parameters.
        num_parameters=sum(p.numel() * (1 + (p.dtype == torch.uint8)) for p in parameters),
        num_trainable=sum(parameter.numel() for parameter in trained),
        num_trainable_tensors=len(trained),
        parameter_bytes=sum(tensors.values()),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
        largest_gradient_bytes=max((p.numel() * p.element_size() for p in trained), default=0),
    )


@contextmanager
def answer_data_questions() -> Iterator[None]:
    """Answer what transformers asks of a tensor's data as a run of `train` would.

    On fake tensors transformers assumes that sequences may be packed and builds a mask; our rows
    have consecutive positions, for which a run finds no packing and builds none.
    """
    from transformers import masking_utils

    with ExitStack() as stack:
        if hasattr(masking_utils, "find_packed_sequence_indices"):
            stack.enter_context(
                mock.patch.object(masking_utils, "find_packed_sequence_indices", _not_packed)
            )
        yield


def _not_packed(position_ids: torch.Tensor) -> None:
    """Say that no sequences are packed; a plain function, since a Mock would keep the tensor."""


def materialise(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Turn the meta tensors of `model` into fake CPU tensors of `mode`, with ties kept."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            data = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = (
                torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
                if is_parameter
                else data
            )
        return made[id(tensor)]

    with mode:
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in list(store.items()):
                    if tensor is not None:
                        store[name] = fake(tensor)
