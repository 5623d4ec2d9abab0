"""The steps of other trainers on fake CUDA-like tensors, as a log for the allocator's replay.

`TrainerStep` says what is run: an SFT step as transformers' Trainer or a plain loop runs it, or
TRL's GRPO step. Unlike `steps`, which traces our own loop for the planner, these run at full depth
and at one shape: they answer for one configuration, allocator included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_lite.grpo.policy import set_checkpointing
from grpo_lite.optimizers import optimizer_row
from grpo_lite.predict.allocator import Event
from grpo_lite.trace.build import FakeModel, answer_data_questions, find_layers, materialise
from grpo_lite.trace.cuda_rules import cuda_kernels
from grpo_lite.trace.quantised import quantise, widen_unquantised
from grpo_lite.trace.recorder import Recorder

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStep:
    """One configuration of another trainer's step."""

    trainer: str
    """"sft" (the model's own loss), "trl" (GRPO with TRL's fused head) or "trl-full-logits"."""
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
    """Compute dtype of autocast; None where the trainer uses none."""
    attention: str = "sdpa"
    """transformers' name: "sdpa", "eager" or "flash_attention_2" (counted as flash sdpa)."""
    checkpointing: bool = False
    """Whether each layer is recomputed in backward."""
    lora_rank: int = 16
    """Rank of each adapter."""
    lora_targets: tuple[str, ...] = ()
    """Names of the adapted layers; empty for all linear layers but the head."""
    double_quantised: bool = True
    """NF4 statistics quantised in turn (qlora)."""
    widens_unquantised: bool = False
    """Whether `prepare_model_for_kbit_training` makes embeddings, norms and head fp32."""
    optimizer: str = "adamw_torch"
    """Name of a row of `optimizers`."""
    keeps_output: bool = True
    """Whether the caller holds the logits while backward runs."""
    compute_capability: str | None = None
    """The card's, for the choice of kernels; None for 8.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """What one process allocates over a run's first two steps."""

    resting: tuple[Event, ...]
    """Weights, buffers and inputs."""
    first: tuple[Event, ...]
    """The first step, in which the optimizer's states appear."""
    later: tuple[Event, ...]
    """Every further step."""
    tensor_bytes: tuple[tuple[str, int], ...]
    """Operation and size of every tensor of a step, the optimizer's included."""


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
        recorder.mark("step", "step")
        _RUNNERS[step.trainer](fake, step)
        gradients = [recorder.index_of(p.grad) for p in fake.trainable if p.grad is not None]
        recorder.mark("optimizer", "optimizer")
        _optimizer_temporaries(fake, step)
        recorder.mark("zero", "zero")
        for parameter in fake.trainable:
            parameter.grad = None
    del gradients
    return _log(fake, step, recorder)


def build_step_model(config: Any, step: TrainerStep) -> FakeModel:
    """Return the model as `step` trains it, on fake tensors."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if step.attention == "eager" else "sdpa"
    dtype = _DTYPES[step.weights_dtype]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
        if step.method == "qlora":
            compute = _DTYPES[step.autocast_dtype or step.weights_dtype]
            quantise(model, compute_dtype=compute, double_quantised=step.double_quantised)
            if step.widens_unquantised:
                widen_unquantised(model)
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

    targets = list(step.lora_targets) or "all-linear"
    lora = LoraConfig(
        r=step.lora_rank,
        lora_alpha=2 * step.lora_rank,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def _run_sft(fake: FakeModel, step: TrainerStep) -> None:
    input_ids = torch.zeros(step.rows, step.tokens, dtype=torch.int64)
    with _autocast(step):
        out = fake.model(input_ids=input_ids, labels=input_ids)
    loss = out.loss
    if not step.keeps_output:
        del out
    loss.backward()


_RUNNERS: dict[str, Callable[[FakeModel, TrainerStep], None]] = {"sft": _run_sft}


@contextmanager
def _autocast(step: TrainerStep) -> Iterator[None]:
    if step.autocast_dtype is None:
        yield
        return
    with torch.autocast("cpu", dtype=_DTYPES[step.autocast_dtype]):
        yield


def _optimizer_temporaries(fake: FakeModel, step: TrainerStep) -> None:
    """Make the largest set of temporaries of the optimizer's step, as its implementation does.

    The foreach AdamW takes the square root of all second moments at once before it divides
    (torch.optim.adamw._multi_tensor_adamw); fused and 8-bit kernels work in place.
    """
    row = optimizer_row(step.optimizer)
    if not row.makes_temporaries:
        return
    roots = [torch.empty_like(parameter) for parameter in fake.trainable]
    del roots


def _log(fake: FakeModel, step: TrainerStep, recorder: Recorder) -> StepLog:
    row = optimizer_row(step.optimizer)
    births = recorder.recording.births
    next_key = len(births)
    resting, next_key = _load_events(fake, step, next_key)
    before: list[Event] = []
    after: list[Event] = []
    for segment in recorder.recording.segments:
        part = before if segment.stage == "step" else after
        for birth, sign in segment.events:
            if sign:
                part.append(Event(birth, births[birth].num_bytes if sign > 0 else 0))
    states = []
    for parameter in fake.trainable:
        for num_bytes in row.state_tensor_bytes(parameter.numel(), parameter.element_size()):
            states.append(Event(next_key, num_bytes))
            next_key += 1
    return StepLog(
        resting=tuple(resting),
        first=(*before, *states, *after),
        later=(*before, *after),
        tensor_bytes=tuple((birth.operation, birth.num_bytes) for birth in births),
    )


def _load_events(fake: FakeModel, step: TrainerStep, key: int) -> tuple[list[Event], int]:
    """Return the log of bringing the model onto the card, and the next free key.

    transformers brings a model that is quantised on the fly straight to the card: it asks for one
    block of the final size first (`caching_allocator_warmup`), then takes weights by name; each
    lies there in its wide form while it is packed, and what `prepare_model_for_kbit_training`
    widens lies there twice for a moment. That leaves holes, and blocks that are a little larger than
    their tensors.
    """
    loading = _Loading(key=key, wide_item=_DTYPES[step.weights_dtype].itemsize)
    modules = list(fake.model.named_modules())
    if step.method == "qlora":
        modules.sort(key=lambda pair: [(p.isdigit(), int(p) if p.isdigit() else p) for p in pair[0].split(".")])
        loading.free(loading.allocate(_warm_up_bytes(fake, loading.wide_item)))
    for _, module in modules:
        loading.bring(module, widens=step.widens_unquantised)
    loading.widen()
    return loading.events, loading.key


def _warm_up_bytes(fake: FakeModel, wide_item: int) -> int:
    frozen = [p for p in fake.model.parameters() if not p.requires_grad]
    return sum(p.numel() * (1 if p.dtype == torch.uint8 else wide_item) for p in frozen)


@dataclass(slots=True)
class _Loading:
    """The log of a load as it grows."""

    key: int
    wide_item: int
    events: list[Event] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _to_widen: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        self.events.append(Event(self.key, num_bytes))
        self.key += 1
        return self.key - 1

    def free(self, key: int) -> None:
        self.events.append(Event(key))

    def bring(self, module: torch.nn.Module, *, widens: bool) -> None:
        """Log the tensors of `module` itself."""
        is_packed = hasattr(module, "dequantised")
        wide = None
        if is_packed:
            wide = self.allocate(module.in_features * module.out_features * self.wide_item)  # type: ignore[operator]  # a linear layer's sizes
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or tensor.untyped_storage()._cdata in self._seen:
                continue
            self._seen.add(tensor.untyped_storage()._cdata)
            num_bytes = tensor.untyped_storage().nbytes()
            frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
            if widens and frozen and not is_packed:
                self._to_widen.append((self.allocate(tensor.numel() * self.wide_item), num_bytes))
            elif num_bytes:
                self.allocate(num_bytes)
        if wide is not None:
            self.free(wide)

    def widen(self) -> None:
        """Log what `prepare_model_for_kbit_training` does: it widens, then empties the cache."""
        for narrow, num_bytes in self._to_widen:
            self.allocate(num_bytes)
            self.free(narrow)
        if self._to_widen:
            self.events.append(Event(None))
