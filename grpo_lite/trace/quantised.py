"""A stand-in for bitsandbytes' `Linear4bit` that can be traced: its bytes, its dequantised matrix.

The real layer cannot be built under fake tensors (Params4bit is a tensor subclass).
The stand-in holds the packed weight and its statistics in the real layer's sizes and calls the
registered dequantise operation, so that the transient wide matrix is seen in forward and backward.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

BLOCK_SIZE = 64
"""Elements that share one absmax (bitsandbytes' default for 4-bit weights)."""
NESTED_BLOCK_SIZE = 256
"""Absmax values that share one absmax where these are quantised in turn (double quantisation)."""
_CODE_SIZE = 16
_NESTED_CODE_SIZE = 256


def quantise(
    model: torch.nn.Module, *, compute_dtype: torch.dtype, double_quantised: bool
) -> torch.nn.Module:
    """Replace every linear layer of `model` but its output layer by a 4-bit stand-in, in place."""
    make = _stand_in_class()
    head = model.get_output_embeddings()  # type: ignore[operator]  # a transformers model
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not head:
                setattr(parent, name, make(child, compute_dtype, double=double_quantised))
    # What peft asks before it takes its path for 4-bit layers.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return model


def widen_unquantised(model: torch.nn.Module) -> None:
    """Make all weights fp32 that are not packed, and freeze all: `prepare_model_for_kbit_training`.

    Embeddings, norms and the output layer double; an 8B model grows by about 2 GiB.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)


@lru_cache(maxsize=1)
def _stand_in_class() -> Any:
    """Return the class, made on first use: its base is bitsandbytes', by which peft knows it."""
    import bitsandbytes as bnb

    class Linear4bitStandIn(bnb.nn.Linear4bit):  # type: ignore[misc]  # untyped base
        """A 4-bit linear layer of the shape of `linear`, made without values."""

        def __init__(self, linear: torch.nn.Linear, compute_dtype: torch.dtype, *, double: bool):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.compute_dtype = compute_dtype
            self.bias = linear.bias
            numel = linear.weight.numel()
            num_blocks = math.ceil(numel / BLOCK_SIZE)
            packed = torch.empty((numel + 1) // 2, 1, dtype=torch.uint8)
            weight: Any = torch.nn.Parameter(packed, requires_grad=False)
            # Read by peft from the real layer's Params4bit.
            weight.compress_statistics, weight.quant_type = double, "nf4"
            self.weight = weight
            self.double_quantised = double
            self._hold("absmax", num_blocks, torch.uint8 if double else torch.float32)
            self._hold("code", _CODE_SIZE, torch.float32)
            if double:
                self._hold(
                    "nested_absmax", math.ceil(num_blocks / NESTED_BLOCK_SIZE), torch.float32
                )
                self._hold("nested_code", _NESTED_CODE_SIZE, torch.float32)
                self._hold("offset", 1, torch.float32)

        def _hold(self, name: str, size: int, dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.empty(size, dtype=dtype), persistent=False)

        def dequantised(self) -> torch.Tensor:
            """Return the weight [out, in] in the compute dtype."""
            absmax = self.absmax
            if self.double_quantised:
                absmax = torch.ops.bitsandbytes.dequantize_blockwise(
                    absmax, self.nested_absmax, self.nested_code, NESTED_BLOCK_SIZE, torch.float32
                )
                absmax = absmax + self.offset
            wide: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
                self.weight,
                absmax,
                BLOCK_SIZE,
                "nf4",
                [self.out_features, self.in_features],
                self.compute_dtype,
            )
            return wide

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the product in the dtype of `x`, computed in the compute dtype."""
            narrow = x.to(self.compute_dtype)
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            return _MatMul4bit.apply(narrow, self, bias).to(x.dtype)  # type: ignore[no-any-return, no-untyped-call]

    return Linear4bitStandIn


class _MatMul4bit(torch.autograd.Function):
    """`bitsandbytes.matmul_4bit`: keeps no input for backward, dequantises again there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.dequantised(), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.matmul(grad, ctx.layer.dequantised().to(grad.dtype)), None, None
