"""What CUDA would allocate where a trace on CPU tensors does otherwise.

A torch without CUDA cannot make fake CUDA tensors, so a step is traced on fake CPU tensors and these
rules put CUDA's kernels in the place of the CPU's. Each names its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any
from unittest import mock

import torch

from grpo_lite.cards.profile import CardProfile


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
"""kernel_backward.h: kBlockSizeI and J of the half-precision kernels before compute capability 8."""


def attention_kernel(compute_capability: str | None, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel that torch takes for causal attention without a mask.

    Flash has no fp32 kernel and none before compute capability 8.0 (sdp_utils.cpp).
    """
    major = float(compute_capability or 8)
    narrow = dtype in (torch.float16, torch.bfloat16)
    return (
        AttentionKernel.FLASH
        if major >= _FLASH_CAPABILITY and narrow
        else (AttentionKernel.EFFICIENT)
    )


def cublas_workspaces(profile: CardProfile) -> tuple[int, ...]:
    """Return the bytes of each cuBLAS workspace that a training step takes from torch's allocator.

    One for each handle and stream, and each thread has its own handle: the main thread's and that
    of autograd's device thread (CUDABlas.cpp, CublasHandlePool.cpp).
    """
    return (int(profile.cublas_workspace_bytes.value),) * 2


@contextmanager
def cuda_kernels(compute_capability: str | None) -> Iterator[None]:
    """Run attention as CUDA of `compute_capability` does, in what it allocates and keeps."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = attention_kernel(compute_capability, query.dtype)
        if attn_mask is not None:
            kernel = AttentionKernel.EFFICIENT  # flash takes no mask (sdp_utils.cpp)
        if kernel is AttentionKernel.EFFICIENT and key.shape[1] != query.shape[1]:
            # The memory-efficient kernel wants as many key heads as query heads.
            groups = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        return _Attention.apply(query, key, value, kernel)  # type: ignore[no-any-return, no-untyped-call]

    with ExitStack() as stack:
        functional = torch.nn.functional
        stack.enter_context(
            mock.patch.object(functional, "scaled_dot_product_attention", attention)
        )
        yield


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
    """Return flash_api.cpp's softmax_d and dq_accum, and dk, dv of every query head where grouped."""
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
