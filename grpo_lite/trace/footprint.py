"""The footprint of (model, workload): shallow traces at a few shapes, unrolled to the full depth.

`rehearse` runs one full-depth step of a plan and returns its true peaks on fake tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from grpo_lite.plan import Category, Phase, Plan, Workload
from grpo_lite.predict.footprint import Footprint, Gradients, Shape, Stage, Weights
from grpo_lite.predict.memory import Rehearsal, micro_batch_shape, optimizer_state_bytes
from grpo_lite.trace.build import (
    FakeModel,
    build_fake,
    build_meta,
    layer_period,
    measure_weights,
    shorten,
)
from grpo_lite.trace.recorder import Recording, running_peaks
from grpo_lite.trace.steps import (
    has_plain_cache,
    record_logprobs,
    record_micro_batch,
    record_rollout,
)
from grpo_lite.trace.unroll import Depth, NotSteady, TermTable, make_stages

_MICRO_SHAPES = (
    Shape(rows=101, tokens=307, completion=97, chunk=3907),
    Shape(rows=127, tokens=211, completion=113, chunk=5881),
    Shape(rows=149, tokens=401, completion=89, chunk=5167),
)
"""Shapes with nothing in common, each with two full head chunks and a shorter third.

Numbers of this size leave one formula for every tensor, and fake tensors cost nothing to grow.
"""

_SHORT_TOKENS = {307: 67, 211: 53, 401: 79}
"""Tokens in place of those above for a sliding window that they would leave."""


def traced_shapes(config: Any, workload: Workload) -> tuple[Shape, ...]:
    """Return the shapes to trace at, on the side of the sliding window on which `workload` is."""
    window = getattr(config, "sliding_window", None)
    if not window or (window > max(_SHORT_TOKENS) and workload.num_tokens <= window):
        return _MICRO_SHAPES
    if workload.num_tokens <= window:
        return tuple(replace(s, tokens=_SHORT_TOKENS[s.tokens]) for s in _MICRO_SHAPES)
    return tuple(replace(s, tokens=s.tokens + window) for s in _MICRO_SHAPES)


def trace_footprint(name: str, config: Any, workload: Workload) -> Footprint:
    """Return what a step of `workload` keeps in memory on the model of the transformers `config`.

    Raises:
        CannotTrace: the model's step does not run alike at every shape or layer.
    """
    period = layer_period(config)
    # What layers share (a rotary table, a mask) dies with the first of its kind in backward, which
    # then is not like the later ones: the repeated layers come after one of each kind.
    try:
        return _trace_at(_depth(config, first_repeated=1), name, config, workload)
    except NotSteady:
        return _trace_at(_depth(config, first_repeated=period + 1), name, config, workload)


def _trace_at(depth: Depth, name: str, config: Any, workload: Workload) -> Footprint:
    fake = build_fake(shorten(config, depth.traced_layers), workload)
    vocabulary = config.get_text_config().vocab_size
    table = TermTable()
    stages: dict[str, Stage] = {}
    shapes = traced_shapes(config, workload)

    def add(record: Callable[[Shape], Recording], shapes: Sequence[Shape] = shapes) -> None:
        recordings = [record(shape) for shape in shapes]
        stages.update(make_stages(shapes, recordings, depth, table, vocabulary))

    # A rollout knows rows and tokens only.
    rollouts = [Shape(rows=shape.rows, tokens=shape.tokens) for shape in shapes]
    add(lambda shape: record_rollout(fake, workload, shape), rollouts)
    if workload.needs_logprob_phase:
        add(lambda shape: record_logprobs(fake, workload, shape))
    add(lambda shape: record_micro_batch(fake, workload, shape, checkpointing=False))
    add(lambda shape: record_micro_batch(fake, workload, shape, checkpointing=True))
    stages = {name: stage for name, stage in stages.items() if not name.startswith("end")}
    return Footprint(
        model=name,
        weights=_full_weights(config, workload, depth, measure_weights(fake.model)),
        terms=tuple(table.terms),
        stages=stages,
        num_layers=config.num_hidden_layers,
        traced_layers=depth.traced_layers,
        versions={
            package: metadata.version(package) for package in ("torch", "transformers", "peft")
        },
        trainable_numels=_trainable_numels(config, workload),
    )


def _trainable_numels(config: Any, workload: Workload) -> tuple[int, ...]:
    """Return the elements of each trained tensor of the full model; empty for adapters.

    What the block engine lays out; adapters are too small to be worth it.
    """
    if workload.method != "full":
        return ()
    model = build_meta(config, workload)
    return tuple(parameter.numel() for parameter in model.parameters())


def _depth(config: Any, *, first_repeated: int) -> Depth:
    """Return how the full depth is made of a shallow one.

    The first and the last layers are traced as they are, and between them those that repeat are
    traced twice, so that their repetition is checked and not assumed.
    """
    layers: int = config.num_hidden_layers
    period = layer_period(config)
    shallow = first_repeated + 2 * period + 1
    shallow += (layers - shallow) % period
    extra_periods = max(0, (layers - shallow) // period)
    return Depth(
        traced_layers=layers if extra_periods == 0 else shallow,
        period=period,
        first_repeated=first_repeated,
        extra_periods=extra_periods,
    )


def _full_weights(config: Any, workload: Workload, depth: Depth, shallow: Weights) -> Weights:
    """Return the weights of the full model: the shallow one's and those of the repeated layers."""
    if depth.extra_periods == 0:
        return shallow
    fewer = build_fake(shorten(config, depth.traced_layers - depth.period), workload)
    other = measure_weights(fewer.model)
    grown = {
        name: getattr(shallow, name)
        + depth.extra_periods * (getattr(shallow, name) - getattr(other, name))
        for name in Weights.__slots__
    }
    return replace(Weights(**grown), largest_gradient_bytes=shallow.largest_gradient_bytes)


def rehearse(config: Any, workload: Workload, plan: Plan) -> Rehearsal:
    """Run one step of `plan` at full depth and at the length caps on fake tensors.

    Returns the allocated peak by phase as the ledger saw it, optimizer state included.
    """
    started_s = time.monotonic()
    fake = build_fake(config, workload)
    weights = measure_weights(fake.model)
    static = {Category.PARAMETER: weights.parameter_bytes}
    if plan.offload == "none":
        static[Category.OPTIMIZER_STATE] = optimizer_state_bytes(weights, workload)
        static[Category.GRADIENT] = weights.gradient_bytes
    resting_bytes = static[Category.PARAMETER] + static.get(Category.OPTIMIZER_STATE, 0)
    peaks: dict[Phase, int] = {Phase.LOAD: weights.parameter_bytes}
    peaks[Phase.ROLLOUT] = resting_bytes + _rollout_peak(fake, workload, plan)
    shape = micro_batch_shape(workload, plan)
    if workload.needs_logprob_phase:
        peaks[Phase.LOGPROB] = resting_bytes + max(
            running_peaks(record_logprobs(fake, workload, shape)).values()
        )
    has_earlier = plan.gradient_accumulation_steps > 1
    gradients = Gradients.ACCUMULATING if has_earlier else Gradients.KEPT
    if plan.offload != "none":
        gradients = Gradients.LEAVING
    recording = record_micro_batch(
        fake,
        workload,
        shape,
        checkpointing=plan.gradient_checkpointing,
        counts_work=False,
    )
    standing_bytes = resting_bytes + static.get(Category.GRADIENT, 0)
    for stage, peak_bytes in running_peaks(recording, gradients).items():
        phase = next((p for p in (Phase.FORWARD, Phase.BACKWARD) if stage.startswith(p)), None)
        if phase is not None:
            earlier = gradients is Gradients.ACCUMULATING
            peaks[phase] = (standing_bytes if earlier else resting_bytes) + peak_bytes
    peaks[Phase.STEP] = standing_bytes
    return Rehearsal(peak_bytes=peaks, seconds=time.monotonic() - started_s)


def _rollout_peak(fake: FakeModel, workload: Workload, plan: Plan) -> int:
    """Return the larger of prefill at the prompt's cap and decode at the full cache."""
    prompt = Shape(rows=plan.rollout_batch, tokens=workload.max_prompt_length)
    last = workload.num_tokens - 2
    decodes = workload.max_completion_length > 1
    if decodes and has_plain_cache(fake):
        recording = record_rollout(fake, workload, prompt, decode_tokens=last, counts_work=False)
        peaks = running_peaks(recording)
        return max(peaks["prefill"], peaks["decode"])
    recording = record_rollout(fake, workload, prompt, counts_work=False)
    peak_bytes = running_peaks(recording)["prefill"]
    if decodes:
        full = Shape(rows=plan.rollout_batch, tokens=last)
        recording = record_rollout(fake, workload, full, counts_work=False)
        peak_bytes = max(peak_bytes, running_peaks(recording)["decode"])
    return peak_bytes
