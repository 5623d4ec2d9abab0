"""What CUDA would allocate where a trace on CPU tensors does otherwise.

A torch without CUDA cannot make fake CUDA tensors, so a step is traced on fake CPU tensors and
these rules put CUDA's kernels in the place of the CPU's. Each names its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class AttentionKernel(StrEnum):
    """The kernels behind `scaled_dot_product_attention` on CUDA."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"


_FLASH_CAPABILITY = 8
"""sdp_utils.cpp: flash attention needs compute capability 8.0."""
_FLASH_ROUND_TOKENS = 128
_FLASH_ROUND_HEAD = 32
"""flash_api.cpp: sequence lengths are rounded to 128 and head sizes to 32 in its buffers."""
_EFFICIENT_ROUND_TOKENS = 32
"""kernel_forward.h: kAlignLSE."""
_EFFICIENT_BLOCK = 64
"""kernel_backward.h: kBlockSizeI and J of the half-precision kernels."""


def attention_kernel(compute_capability: str | None, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel that torch takes for causal attention without a mask.

    Flash has no fp32 kernel and none before compute capability 8.0 (sdp_utils.cpp).
    """
    major = float(compute_capability or 8)
    narrow = dtype in (torch.float16, torch.bfloat16)
    is_flash = major >= _FLASH_CAPABILITY and narrow
    return AttentionKernel.FLASH if is_flash else AttentionKernel.EFFICIENT


@contextmanager
def cuda_kernels(compute_capability: str | None) -> Iterator[None]:
    """Run attention as CUDA of `compute_capability` does, in what it allocates and keeps."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        kernel = attention_kernel(compute_capability, query.dtype)
        if attn_mask is not None:
            kernel = AttentionKernel.EFFICIENT  # flash takes no mask (sdp_utils.cpp)
        if kernel is AttentionKernel.EFFICIENT and key.shape[1] != query.shape[1]:
            # The memory-efficient kernel wants as many key heads as query heads.
            groups = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        return _Attention.apply(query, key, value, kernel)  # type: ignore[no-any-return, no-untyped-call]

    functional = torch.nn.functional
    with (
        mock.patch.object(functional, "scaled_dot_product_attention", attention),
        mock.patch.object(functional, "softmax", _softmax),
        mock.patch.object(functional, "dropout", _dropout),
    ):
        yield


@contextmanager
def trl_kernels() -> Iterator[None]:
    """Run TRL's fused head as on CUDA, where Triton kernels fold a tile of logits in place.

    Its torch path for other devices, which a trace would see, makes wide copies of each tile
    (trl.kernels.chunked_logprob, TRL 1.15).
    """
    from trl.kernels import chunked_logprob

    with (
        mock.patch.object(chunked_logprob, "_forward_tile", _in_place),
        mock.patch.object(chunked_logprob, "_backward_tile", _in_place),
        mock.patch.object(chunked_logprob, "_addmm_fp32", _in_place),
    ):
        yield


def _in_place(*tensors: Any, **options: Any) -> None:
    """Stand for a kernel that allocates nothing."""


@contextmanager
def cuda_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Run as under CUDA's autocast to `dtype`; None leaves autocast off.

    The CPU's autocast narrows the same products, but leaves narrow what CUDA's makes fp32
    (autocast_mode.h: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE).
    """
    if dtype is None:
        yield
        return
    with torch.autocast("cpu", dtype=dtype), _WideOperations():
        yield


_WIDE = {
    torch.nn.functional.layer_norm,
    torch.nn.functional.log_softmax,
    torch.nn.functional.cross_entropy,
    torch.nn.functional.nll_loss,
    torch.nn.functional.softplus,
    torch.nn.functional.softmax,
    torch.softmax,
    torch.log_softmax,
    torch.logsumexp,
    torch.exp,
    torch.log,
    torch.pow,
    torch.rsqrt,
    torch.sum,
    torch.cumsum,
    torch.prod,
    torch.norm,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.exp,
    torch.Tensor.log,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    torch.Tensor.rsqrt,
    torch.Tensor.sum,
    torch.Tensor.cumsum,
    torch.Tensor.prod,
    torch.Tensor.norm,
}
"""What CUDA's autocast runs in fp32, of the operations that language models call."""


class _WideOperations(TorchFunctionMode):
    """Widens the narrow arguments of the operations in _WIDE."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, its tensors widened where CUDA's autocast would."""
        kwargs = kwargs or {}
        if func in _WIDE and kwargs.get("dtype") is None:
            args = tuple(_widened(argument) for argument in args)
            kwargs = {name: _widened(argument) for name, argument in kwargs.items()}
        return func(*args, **kwargs)


def _widened(argument: Any) -> Any:
    is_narrow = isinstance(argument, torch.Tensor) and argument.dtype in (
        torch.float16,
        torch.bfloat16,
    )
    return argument.float() if is_narrow else argument


def _softmax(
    x: torch.Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _Softmax.apply(x, dtype or x.dtype)  # type: ignore[no-any-return, no-untyped-call]


class _Softmax(torch.autograd.Function):
    """SoftMax.cu: reads a narrow input and writes a wide output at once.

    Its backward makes grad x output first (softmax_backward_cuda_out) and returns a gradient in the
    input's dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty_like(x, dtype=dtype)
        ctx.input_dtype = x.dtype
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        product = grad * out
        result = torch.empty_like(out, dtype=ctx.input_dtype)
        del product
        return result, None


def _dropout(
    x: torch.Tensor,
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    return _Dropout.apply(x) if training and p > 0 else x  # type: ignore[no-untyped-call]


class _Dropout(torch.autograd.Function):
    """Dropout.cu: one fused kernel that writes the output and keeps a mask of one byte each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad)


class _Attention(torch.autograd.Function):
    """One fused attention: output and log-sum-exp are kept, no matrix of scores is made."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Any
    ) -> torch.Tensor:
        rows, heads, tokens, _ = query.shape
        # Both kernels write [rows, tokens, heads, size] and return a view of it.
        out = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        round_tokens = 1 if kernel is AttentionKernel.FLASH else _EFFICIENT_ROUND_TOKENS
        sums = query.new_empty(rows, heads, _up(tokens, round_tokens), dtype=torch.float32)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _out, _sums = ctx.saved_tensors
        grads = [_like(tensor) for tensor in (query, key, value)]
        work = (_flash_work if ctx.kernel is AttentionKernel.FLASH else _efficient_work)(query, key)
        del work
        return (*grads, None)


def _flash_work(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    """Return flash_api.cpp's softmax_d and dq_accum, and dk, dv of every head where grouped."""
    rows, heads, tokens, size = query.shape
    tokens, size = _up(tokens, _FLASH_ROUND_TOKENS), _up(size, _FLASH_ROUND_HEAD)
    work = [
        query.new_empty(rows, heads, tokens, dtype=torch.float32),
        query.new_empty(rows, heads, tokens, size, dtype=torch.float32),
    ]
    if key.shape[1] != heads:
        work += [query.new_empty(rows, key.shape[2], heads, key.shape[3]) for _ in range(2)]
    return work


def _efficient_work(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    """Return attention_backward.cu's delta, and the fp32 sums of gradients of narrow dtypes."""
    rows, heads, tokens, size = query.shape
    work = [query.new_empty(rows, heads, tokens, dtype=torch.float32)]
    if query.dtype == torch.float32:
        return work
    block = _EFFICIENT_BLOCK
    accumulated = 1 if size <= block else 3  # dq always; dk, dv where they outgrow the registers
    work += [
        query.new_empty(rows, heads, _up(tokens, block), _up(size, block), dtype=torch.float32)
        for _ in range(accumulated)
    ]
    return work


def _like(tensor: torch.Tensor) -> torch.Tensor:
    rows, heads, tokens, size = tensor.shape
    return tensor.new_empty(rows, tokens, heads, size).transpose(1, 2)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
