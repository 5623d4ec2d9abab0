"""The steps of other trainers on fake tensors under CUDA's rules, as a log for the allocator.

`TrainerStep` says what is run: an SFT step as transformers' Trainer or a plain loop runs it, or
TRL's GRPO step. Unlike `steps`, which traces our own loop for the planner, these run at full depth
and at one shape: they answer for one configuration, allocator included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_lite.errors import UsageError
from grpo_lite.grpo.policy import set_checkpointing
from grpo_lite.optimizers import optimizer_row
from grpo_lite.predict.allocator import Event
from grpo_lite.trace.build import FakeModel, answer_data_questions, find_layers, materialise
from grpo_lite.trace.cuda_rules import cuda_autocast, cuda_kernels, trl_kernels
from grpo_lite.trace.loading import loading_events
from grpo_lite.trace.quantised import quantise, widen_unquantised
from grpo_lite.trace.recorder import Recorder

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ENTROPY_TOKENS = 128
"""Tokens whose entropy TRL computes at once (entropy_from_logits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStep:
    """One configuration of another trainer's step."""

    trainer: str
    """"sft" (the model's own loss), "trl" (GRPO, fused head) or "trl-full-logits" (before 1.15)."""
    method: str
    """"full", "lora" or "qlora" (NF4)."""
    rows: int
    """Rows of one forward."""
    tokens: int
    """Tokens of a row."""
    completion: int = 0
    """Completion tokens of a row (GRPO)."""
    weights_dtype: str = "bfloat16"
    """Dtype of the weights as loaded."""
    autocast_dtype: str | None = None
    """Compute dtype of accelerate's mixed precision, which makes outputs fp32; None without."""
    attention: str = "sdpa"
    """transformers' name: "sdpa", "eager" or "flash_attention_2" (counted as flash sdpa)."""
    checkpointing: bool = False
    """Whether each layer is recomputed in backward."""
    lora_rank: int = 16
    """Rank of each adapter."""
    lora_targets: tuple[str, ...] = ()
    """Names of the adapted layers; empty for all linear layers but the head."""
    lora_dropout: float = 0.0
    """Dropout in front of each adapter."""
    adapter_dtype: str = "float32"
    """Dtype of the adapters: peft makes them fp32, TRL's QLoRA bfloat16."""
    quantised_compute_dtype: str | None = None
    """Dtype in which 4-bit layers compute; None for autocast's, else the weights' (qlora)."""
    double_quantised: bool = True
    """NF4 statistics quantised in turn (qlora)."""
    widens_unquantised: bool = False
    """Whether `prepare_model_for_kbit_training` makes embeddings, norms and head fp32."""
    optimizer: str = "adamw_torch"
    """Name of a row of `optimizers`."""
    keeps_output: bool = False
    """Whether the caller holds the logits while backward runs."""
    compute_capability: str | None = None
    """The card's, for the choice of kernels; None for 8.0."""
    cublas_workspace_bytes: int = 8_519_680
    """Of each cuBLAS handle and stream: 8.125 MiB, 32 MiB on Hopper (CUDABlas.cpp)."""

    def __post_init__(self) -> None:
        if self.trainer not in _RUNNERS:
            raise UsageError(
                f"trainer is {self.trainer!r}; it must be one of {', '.join(_RUNNERS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """What one process allocates over a run's first two steps."""

    loading: tuple[Event, ...]
    """The model on its way to the card."""
    first: tuple[Event, ...]
    """The first step, in which the optimizer's states appear."""
    later: tuple[Event, ...]
    """Every further step."""
    tensors: tuple[tuple[str, int], ...]
    """Operation and bytes of every tensor that a step makes."""


def record_step(config: Any, step: TrainerStep) -> StepLog:
    """Return the log of `step` on the model of the transformers `config`.

    Raises:
        UsageError: the model cannot be built or adapted as asked.
    """
    fake = build_step_model(config, step)
    recorder = Recorder(counts_work=False)
    set_checkpointing(fake.model, enabled=step.checkpointing)
    fake.model.train()
    with (
        fake.mode,
        answer_data_questions(),
        cuda_kernels(step.compute_capability),
        recorder.record(fake.tensors),
    ):
        recorder.mark("forward", "step")
        loss, kept = _RUNNERS[step.trainer](fake.model, step)
        recorder.mark("backward", "step")
        with trl_kernels() if step.trainer == "trl" else nullcontext():
            loss.backward()
        del loss, kept
        recorder.mark("optimizer", "step")
        _optimizer_temporaries(fake, step)
        for parameter in fake.trainable:
            parameter.grad = None
    return _log(fake, step, recorder)


def build_step_model(config: Any, step: TrainerStep) -> FakeModel:
    """Return the model as `step` trains it, on fake tensors."""
    from transformers import AutoModelForCausalLM

    dtype = _DTYPES[step.weights_dtype]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation="eager" if step.attention == "eager" else "sdpa",
        )
        if step.method == "qlora":
            compute = step.quantised_compute_dtype or step.autocast_dtype or step.weights_dtype
            quantise(model, compute_dtype=_DTYPES[compute], double_quantised=step.double_quantised)
            if step.widens_unquantised:
                widen_unquantised(model)
        if step.trainer == "trl":
            _add_fused_head(model)
        if step.method != "full":
            model = _adapt(model, step)
    model.config.use_cache = False
    if step.checkpointing and step.method != "full":
        model.enable_input_require_grads()
    mode = FakeTensorMode()
    materialise(model, mode)
    return FakeModel(model=model, layers=find_layers(model, config), mode=mode)


def _adapt(model: Any, step: TrainerStep) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=step.lora_rank,
        lora_alpha=2 * step.lora_rank,
        lora_dropout=step.lora_dropout,
        target_modules=list(step.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise UsageError(f"the adapters cannot be placed: {error}") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_DTYPES[step.adapter_dtype])
    return adapted


def _add_fused_head(model: Any) -> None:
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise UsageError(
            "the fused head of TRL is traced through TRL itself, and TRL 1.15 is not installed",
            hint="pip install 'trl>=1.15'",
        ) from error
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))


def _run_sft(model: Any, step: TrainerStep) -> tuple[torch.Tensor, Any]:
    input_ids = torch.zeros(step.rows, step.tokens, dtype=torch.int64)
    with cuda_autocast(_autocast_dtype(step)):
        out = model(input_ids=input_ids, labels=input_ids)
    if step.autocast_dtype is not None:
        # accelerate's convert_outputs_to_fp32, while the caller still has the output.
        out.logits = out.logits.float()
    return out.loss, out if step.keeps_output else None


def _run_trl_full_logits(model: Any, step: TrainerStep) -> tuple[torch.Tensor, Any]:
    """Run TRL before 1.15: all logits of the completion, fp32 by accelerate, divided, reduced."""
    input_ids = torch.zeros(step.rows, step.tokens, dtype=torch.int64)
    targets = input_ids[:, -step.completion :]
    with cuda_autocast(_autocast_dtype(step)):
        logits = model(input_ids=input_ids, logits_to_keep=step.completion + 1).logits
        if step.autocast_dtype is not None:
            logits = logits.float()
        logits = logits[:, :-1, :]
        logits = logits / 1.0
        logprobs = _selected_logprobs(logits, targets)
        with torch.no_grad():
            _entropies(logits)
        return _grpo_loss(logprobs), None


def _selected_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return log-probs as TRL's selective_log_softmax: row by row, narrow logits by log_softmax."""
    index = targets.unsqueeze(-1)
    if logits.dtype == torch.float32:
        chosen = torch.gather(logits, -1, index).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = [
        torch.nn.functional.log_softmax(row, dim=-1).gather(-1, place).squeeze(-1)
        for row, place in zip(logits, index, strict=True)
    ]
    return torch.stack(rows)


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    parts = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(_ENTROPY_TOKENS):
        logprobs = torch.nn.functional.log_softmax(chunk, dim=-1)
        parts.append(-(torch.exp(logprobs) * logprobs).sum(-1))
    return torch.cat(parts)


def _run_trl(model: Any, step: TrainerStep) -> tuple[torch.Tensor, Any]:
    """Run TRL from 1.15 on: its own fused head, which never holds all logits."""
    input_ids = torch.zeros(step.rows, step.tokens, dtype=torch.int64)
    labels = input_ids.clone()
    labels[:, : -step.completion] = -100
    with trl_kernels(), cuda_autocast(_autocast_dtype(step)):
        out = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        return _grpo_loss(out.log_probs[:, -step.completion :]), None


def _grpo_loss(logprobs: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logprobs - logprobs.detach())
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -torch.min(ratio, clipped).sum()


_RUNNERS: dict[str, Callable[[Any, TrainerStep], tuple[torch.Tensor, Any]]] = {
    "sft": _run_sft,
    "trl": _run_trl,
    "trl-full-logits": _run_trl_full_logits,
}


def _autocast_dtype(step: TrainerStep) -> torch.dtype | None:
    return None if step.autocast_dtype is None else _DTYPES[step.autocast_dtype]


def _optimizer_temporaries(fake: FakeModel, step: TrainerStep) -> None:
    """Make the largest set of temporaries of the optimizer's step, as its implementation does.

    The foreach AdamW takes the square root of all second moments at once before it divides
    (torch.optim.adamw: _multi_tensor_adam); fused and 8-bit kernels work in place.
    """
    if optimizer_row(step.optimizer).makes_temporaries:
        roots = [torch.empty_like(parameter) for parameter in fake.trainable]
        del roots


def _log(fake: FakeModel, step: TrainerStep, recorder: Recorder) -> StepLog:
    births = recorder.recording.births
    parts: dict[str, list[Event]] = {"forward": [], "backward": [], "optimizer": []}
    products: dict[str, int] = {}
    for segment in recorder.recording.segments:
        name = segment.stage if segment.stage in parts else "optimizer"
        for birth, sign in segment.events:
            if sign:
                parts[name].append(Event(birth, births[birth].num_bytes if sign > 0 else 0))
            if sign > 0 and births[birth].operation in _PRODUCTS:
                products.setdefault(name, len(parts[name]) - 1)
    keys = itertools.count(len(births))
    # Each thread makes its cuBLAS handle at its first product: the main one, and autograd's.
    first = []
    for name in ("forward", "backward"):
        workspace = Event(next(keys), step.cublas_workspace_bytes)
        place = products.get(name, 0)
        first += [*parts[name][:place], workspace, *parts[name][place:]]
    first += [*_state_events(fake, step, keys), *parts["optimizer"]]
    return StepLog(
        loading=tuple(
            loading_events(fake.model, wide_item=_DTYPES[step.weights_dtype].itemsize, keys=keys)
        ),
        first=tuple(first),
        later=(*parts["forward"], *parts["backward"], *parts["optimizer"]),
        tensors=tuple((birth.operation, birth.num_bytes) for birth in births),
    )


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
"""Operations that cuBLAS runs."""


def _state_events(fake: FakeModel, step: TrainerStep, keys: Iterator[int]) -> list[Event]:
    row = optimizer_row(step.optimizer)
    return [
        Event(next(keys), num_bytes)
        for parameter in fake.trainable
        for num_bytes in row.state_tensor_bytes(parameter.numel(), parameter.element_size())
    ]
