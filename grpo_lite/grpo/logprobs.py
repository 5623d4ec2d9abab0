"""Log-probabilities of given tokens from hidden states, without all the logits at once.

Logits are made for a chunk of tokens, reduced to a few numbers per token, and dropped; backward
makes each chunk again.
Knows the output layer of a causal language model; nothing of losses, rows or masks.

Shape suffixes: N tokens, C tokens of one chunk, H hidden size, V vocabulary.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes are the tensors' documentation)

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from grpo_lite.errors import UsageError

_SLAB_ROWS = 4096
"""Rows of the vocabulary whose weight gradient is narrow at once: a fixed number, so that a trace
runs the same operations at every chunk size."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """The output layer: logits = cap(scale * (hidden @ weight.T + bias)).

    cap(x) is softcap * tanh(x / softcap), or x without a softcap.
    """

    weight_VH: torch.Tensor
    """Any float dtype; a leaf with `requires_grad` if the head is trained."""
    bias_V: torch.Tensor | None = None
    """Added before `scale`."""
    softcap: float | None = None
    """Bound of the logits' absolute value (Gemma's `final_logit_softcapping`)."""
    scale: float = 1.0
    """Factor on the logits (Cohere's `logit_scale`, one over Granite's `logits_scaling`)."""
    add_into_grad: bool = False
    """Whether backward adds to an existing `weight_VH.grad` in place; see `chunked_logprobs`."""


def chunked_logprobs(
    hidden_NH: torch.Tensor,
    head: HeadWeights,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities [N] of `targets_N` and, if asked, the entropies [N] in nats.

    Both are of the distribution softmax(logits / temperature), in fp32 (fp64 for fp64 input).
    Both are differentiable; a gradient through the entropies costs only if one arrives.

    Products are in the compute dtype: autocast's where it is on, else that of `hidden_NH`.
    All else (softmax, sums, the gradient of the weight over chunks) is in fp32.
    What it holds, in bytes per logit: see `_ChunkedLogprobs`.

    `head.add_into_grad`: where the weight is a leaf that has an fp32 `.grad` when backward comes
    (accumulation), the head's part is added to it in place and no second [V, H] exists.
    Autograd then sees no gradient for this use of the weight: `register_hook` does not see that
    part; post-accumulate hooks run as ever, with the whole sum in `.grad`.
    With tied embeddings the embedding's part comes later, through autograd as ever.
    Without a `.grad` the gradient goes through autograd as without the flag.

    Args:
        hidden_NH: last hidden states, after the final norm.
        head: the output layer, as from `head_of`.
        targets_N: int64 token ids, each in [0, V).
        temperature: divides the logits; above 0.
        chunk_tokens: tokens whose logits exist at once; the last chunk may be shorter.
        with_entropy: whether to return entropies; None otherwise.

    Raises:
        UsageError: temperature or chunk_tokens is not positive.
    """
    if temperature <= 0 or chunk_tokens < 1:
        raise UsageError(
            f"temperature must be above 0 and chunk_tokens at least 1; got temperature "
            f"{temperature}, chunk_tokens {chunk_tokens}"
        )
    rule = _rule(
        hidden_NH,
        head,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )
    logprobs_N, entropies_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden_NH, head.weight_VH, head.bias_V, targets_N, rule
    )
    return logprobs_N, entropies_N


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What a call does with numbers, apart from its tensors."""

    temperature: float
    chunk_tokens: int
    with_entropy: bool
    softcap: float | None
    scale: float
    add_into_grad: bool
    compute_dtype: torch.dtype
    wide_dtype: torch.dtype


def _rule(
    hidden_NH: torch.Tensor,
    head: HeadWeights,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> _Rule:
    device_type = hidden_NH.device.type
    compute_dtype = hidden_NH.dtype
    is_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
        device_type
    )
    # As autocast itself, leave fp64 alone.
    if is_autocast and compute_dtype != torch.float64:
        compute_dtype = torch.get_autocast_dtype(device_type)
    return _Rule(
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        softcap=head.softcap,
        scale=head.scale,
        add_into_grad=head.add_into_grad,
        compute_dtype=compute_dtype,
        wide_dtype=torch.promote_types(compute_dtype, torch.float32),
    )


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    # Backward may be called inside autocast though forward was not: products would be narrowed.
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class _ChunkedLogprobs(torch.autograd.Function):
    """`chunked_logprobs` as autograd sees it; backward makes each chunk's logits again.

    Saved for backward: the inputs and 2 fp32 numbers per token (3 with entropy).

    Peak bytes per logit of one chunk (C x V logits alive), in forward and in backward:
        fp32 compute   4 = the fp32 logits, reduced or turned into their gradient in place
        bf16 compute   6 = fp32 4 + the product before it is widened (forward), or the gradient
                       narrowed for its products (backward) 2
        softcap        8 in backward: its slope is a second fp32 buffer (forward as above)
        entropy        8 in backward (12 with softcap) if a gradient arrives through it, else
                       nothing more
    Beside the chunk:
        a copy [V, H] of the weight in the compute dtype, once per forward and once per backward,
        if the weight has another dtype (bf16 autocast over an fp32 weight: 2 bytes);
        in backward [N, H] in hidden's dtype, and if the weight is trained one fp32 [V, H], cast
        at the end to the weight's dtype if that is another.
        With bf16 compute the product for the weight is added slab by slab, each no larger than
        the fp32 logits that are gone by then (or 4096 rows of the vocabulary); so each chunk's part
        is rounded to bf16 once before it is summed in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        rule: _Rule,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities and entropies (None if not asked for)."""
        num_tokens = hidden_NH.shape[0]
        logprobs_N, peaks_N, totals_N = (
            hidden_NH.new_empty(num_tokens, dtype=rule.wide_dtype) for _ in range(3)
        )
        entropies_N = torch.empty_like(logprobs_N) if rule.with_entropy else None
        narrow_VH = weight_VH.to(rule.compute_dtype)
        for rows in _chunks(num_tokens, rule.chunk_tokens):
            logits_CV = _chunk_logits(hidden_NH[rows], narrow_VH, bias_V, rule)
            logprobs_N[rows] = logits_CV.gather(1, targets_N[rows, None]).squeeze(1)
            peaks_N[rows] = logits_CV.amax(1)
            terms_CV = logits_CV.sub_(peaks_N[rows, None]).exp_()
            totals_N[rows] = terms_CV.sum(1)
            if entropies_N is not None:
                shares_CV = terms_CV.div_(totals_N[rows, None])
                entropies_N[rows] = torch.special.entr(shares_CV, out=shares_CV).sum(1)
                del shares_CV
            # Else they would live on beside the next chunk's.
            del logits_CV, terms_CV
        # In this order a token that is nearly certain loses no digits.
        logprobs_N.sub_(peaks_N).sub_(totals_N.log())
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, targets_N, peaks_N, totals_N, entropies_N
        )
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropies_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, where needed."""
        hidden_NH = ctx.saved_tensors[0]
        with _no_autocast(hidden_NH.device.type):
            return _backward(ctx, grad_logprobs_N, grad_entropies_N)


def _backward(
    ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropies_N: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    rule: _Rule = ctx.rule
    hidden_NH, weight_VH, bias_V, targets_N, peaks_N, totals_N, entropies_N = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    chain = rule.scale / rule.temperature
    grad_logprobs_N = (
        torch.zeros_like(peaks_N) if grad_logprobs_N is None else grad_logprobs_N * chain
    )
    grad_entropies_N = None if grad_entropies_N is None else grad_entropies_N * chain
    grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
    existing_VH = _existing_grad(weight_VH, rule)
    grad_weight_VH = None
    if needs_weight:
        grad_weight_VH = (
            torch.zeros_like(weight_VH, dtype=rule.wide_dtype)
            if existing_VH is None
            else existing_VH
        )
    grad_bias_V = torch.zeros_like(bias_V, dtype=rule.wide_dtype) if needs_bias else None
    narrow_VH = weight_VH.to(rule.compute_dtype)
    for rows in _chunks(hidden_NH.shape[0], rule.chunk_tokens):
        grad_CV = _grad_logits(
            _chunk_logits(hidden_NH[rows], narrow_VH, bias_V, rule),
            _ChunkStatistics(
                targets_C1=targets_N[rows, None],
                peaks_C1=peaks_N[rows, None],
                totals_C1=totals_N[rows, None],
                entropies_C1=None if entropies_N is None else entropies_N[rows, None],
                grad_logprobs_C1=grad_logprobs_N[rows, None],
                grad_entropies_C1=None
                if grad_entropies_N is None
                else grad_entropies_N[rows, None],
            ),
            rule,
        )
        if grad_bias_V is not None:
            grad_bias_V.add_(grad_CV.sum(0))
        grad_CV = grad_CV.to(rule.compute_dtype)
        if grad_hidden_NH is not None:
            grad_hidden_NH[rows] = grad_CV @ narrow_VH
        if grad_weight_VH is not None:
            hidden_CH = hidden_NH[rows].to(rule.compute_dtype)
            _add_product(grad_weight_VH, grad_CV, hidden_CH)
        # Else it would live on beside the next chunk's.
        del grad_CV
    if grad_weight_VH is not None:
        is_added = existing_VH is not None
        grad_weight_VH = None if is_added else grad_weight_VH.to(weight_VH.dtype)
    if grad_bias_V is not None:
        grad_bias_V = grad_bias_V.to(bias_V.dtype)
    return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ChunkStatistics:
    """What backward knows of each token of a chunk, as columns [C, 1]."""

    targets_C1: torch.Tensor
    peaks_C1: torch.Tensor
    totals_C1: torch.Tensor
    entropies_C1: torch.Tensor | None
    grad_logprobs_C1: torch.Tensor
    grad_entropies_C1: torch.Tensor | None


def _chunk_logits(
    hidden_CH: torch.Tensor, narrow_VH: torch.Tensor, bias_V: torch.Tensor | None, rule: _Rule
) -> torch.Tensor:
    """Return logits / temperature [C, V] in the wide dtype, in a buffer of their own."""
    logits_CV = (hidden_CH.to(rule.compute_dtype) @ narrow_VH.t()).to(rule.wide_dtype)
    if bias_V is not None:
        logits_CV.add_(bias_V)
    return transform_logits_(
        logits_CV, softcap=rule.softcap, scale=rule.scale, temperature=rule.temperature
    )


def transform_logits_(
    product_CV: torch.Tensor, *, softcap: float | None, scale: float, temperature: float = 1.0
) -> torch.Tensor:
    """Turn hidden @ weight.T + bias into logits / temperature, in place."""
    if softcap is None:
        factor = scale / temperature
        return product_CV if factor == 1 else product_CV.mul_(factor)
    return product_CV.mul_(scale / softcap).tanh_().mul_(softcap / temperature)


def _grad_logits(logits_CV: torch.Tensor, at: _ChunkStatistics, rule: _Rule) -> torch.Tensor:
    """Turn logits / temperature into the gradient of hidden @ weight.T + bias, in place.

    With p = softmax, t the target and H the entropy:
        d logprob / d logit_j = [j = t] - p_j
        d entropy / d logit_j = -p_j (log p_j + H)
        d logit / d product = scale / temperature * (1 - (logit * temperature / softcap)^2)
    The factor scale / temperature is in the incoming gradients already.
    """
    slope_CV = None
    if rule.softcap is not None:
        slope_CV = logits_CV * (rule.temperature / rule.softcap)
        slope_CV.square_().neg_().add_(1)
    shifted_CV = logits_CV.sub_(at.peaks_C1)
    if at.grad_entropies_C1 is None:
        grad_CV = shifted_CV.exp_().mul_(-at.grad_logprobs_C1 / at.totals_C1)
    else:
        assert at.entropies_C1 is not None, "a gradient came for entropies that were not made"
        shares_CV = shifted_CV.exp().div_(at.totals_C1)
        grad_CV = shifted_CV.sub_(at.totals_C1.log() - at.entropies_C1)
        grad_CV.mul_(-at.grad_entropies_C1).sub_(at.grad_logprobs_C1).mul_(shares_CV)
        del shares_CV
    grad_CV.scatter_add_(1, at.targets_C1, at.grad_logprobs_C1)
    return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def _existing_grad(weight_VH: torch.Tensor, rule: _Rule) -> torch.Tensor | None:
    """Return the weight's own wide `.grad` [V, H] if its gradient may be added to it in place."""
    if not (rule.add_into_grad and weight_VH.is_leaf):
        return None
    grad_VH = weight_VH.grad
    return grad_VH if grad_VH is not None and grad_VH.dtype == rule.wide_dtype else None


def _add_product(sum_VH: torch.Tensor, grad_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    """Add grad.T @ hidden to `sum_VH` in place."""
    if sum_VH.dtype == grad_CV.dtype:
        sum_VH.addmm_(grad_CV.t(), hidden_CH)
        return
    for slab in _chunks(sum_VH.shape[0], _SLAB_ROWS):
        sum_VH[slab].add_(grad_CV[:, slab].t() @ hidden_CH)


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
