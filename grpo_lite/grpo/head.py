"""The output layer of a Hugging Face causal language model, read and checked.

`head_of` reads weights and transform (softcap, scale) from model and config; `check_head` compares
them with the model's own logits, so that a family with another transform is refused, never
silently trained with wrong log-probabilities.
Knows models; the arithmetic is in `logprobs`.
"""

# ruff: noqa: N803, N806 (shape suffixes: B rows, T and N tokens, H hidden size, V vocabulary)

from typing import Any

import torch

from grpo_lite.errors import UsageError
from grpo_lite.grpo.logprobs import HeadWeights, chunked_logprobs, transform_logits_

__all__ = ["HeadWeights", "body_of", "check_head", "chunked_logprobs", "head_of"]

# Real models have logits of this size; random weights give tiny ones, on which no softcap shows.
_CHECKED_LOGIT = 40.0
_CHECK_TOKENS = 8
_DIVISORS = ("logits_scaling",)
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


def body_of(model: Any) -> Any:
    """Return the part of `model` whose `last_hidden_state` its output layer reads.

    Adapters of peft stay active in it.
    """
    return _unwrapped(model).base_model


def head_of(model: Any) -> HeadWeights:
    """Return the output layer of `model`, a causal language model of transformers or peft.

    Raises:
        UsageError: there is none, or it is more than one matrix (adapters on it, 4-bit weights).
    """
    inner = _unwrapped(model)
    layer = inner.get_output_embeddings()
    model_type = inner.config.model_type
    if layer is None:
        raise UsageError(f"model_type {model_type!r} has no output layer (get_output_embeddings)")
    if type(layer) is not torch.nn.Linear:
        raise UsageError(
            f"the output layer of model_type {model_type!r} is a {type(layer).__name__}; "
            "only a plain torch.nn.Linear is supported",
            hint="leave lm_head out of the adapters and of quantisation: "
            "target_modules='all-linear' does so",
        )
    config = inner.config.get_text_config()
    scale = 1.0
    for name in _DIVISORS:
        scale /= _number(config, name)
    for name in _FACTORS:
        scale *= _number(config, name)
    return HeadWeights(
        weight_VH=layer.weight,
        bias_V=layer.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=scale,
    )


def check_head(model: Any) -> None:
    """Compare `head_of(model)` over `body_of(model)` with the model's own logits.

    Runs the model on a few random tokens, with the output layer's products blown up to the size
    that trained models have.
    For real weights: reads numbers, so it cannot run on fake tensors.

    Raises:
        UsageError: they differ, so this family transforms its logits in an unknown way.
    """
    inner = _unwrapped(model)
    head = head_of(model)
    model_type = inner.config.model_type
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, head.weight_VH.shape[0], (1, _CHECK_TOKENS), generator=generator)
    ids_BT = ids_BT.to(head.weight_VH.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            hidden_NH = body_of(model)(input_ids=ids_BT, use_cache=False).last_hidden_state[0]
            product_NV = torch.nn.functional.linear(hidden_NH, head.weight_VH, head.bias_V)
            largest = product_NV.abs().max().item()
            gain = _CHECKED_LOGIT / largest if largest > 0 else 1.0
            wanted_NV = _logits_with_gain(model, ids_BT, gain)
            got_NV = transform_logits_(
                product_NV.float().mul_(gain), softcap=head.softcap, scale=head.scale
            )
    finally:
        model.train(was_training)
    difference = (got_NV - wanted_NV).abs().max().item()
    size = wanted_NV.abs().max().item()
    tolerance = 1e-4 if wanted_NV.dtype in (torch.float32, torch.float64) else 3e-2
    if not (size > 0 and difference <= tolerance * size):
        raise UsageError(
            f"logits of model_type {model_type!r} are not understood: the model's own reach "
            f"{size:.4g}, ours differ by {difference:.4g}; it would be trained on wrong "
            "log-probabilities",
            hint="use a model family whose logits are a plain, scaled or softcapped matrix product",
        )


def _logits_with_gain(model: Any, ids_BT: torch.Tensor, gain: float) -> torch.Tensor:
    layer = _unwrapped(model).get_output_embeddings()
    handle = layer.register_forward_hook(lambda _module, _inputs, output: output * gain)
    try:
        logits: torch.Tensor = model(input_ids=ids_BT, use_cache=False).logits[0]
    finally:
        handle.remove()
    return logits


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else float(value)
