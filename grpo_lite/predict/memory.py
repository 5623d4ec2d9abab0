"""Bytes of a plan, by phase and category, computed from a footprint.

Peak is the maximum over phases of what is alive together, never a sum of maxima.
Pure; knows no torch and no card beyond its budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_lite.optimizers import BLOCK_BYTES, optimizer_row
from grpo_lite.plan import Category, Phase, Plan, Workload
from grpo_lite.predict.footprint import (
    Footprint,
    Gradients,
    Shape,
    Term,
    Weights,
    evaluate,
    stage_name,
)

STEP_COUNTER_BYTES = 4
"""torch keeps one fp32 step count for each trained tensor (torch.optim.AdamW, fused)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors of one kind that are alive together at a peak, with their arithmetic."""

    category: Category
    """What they are held for."""
    operation: str
    """The operation that makes them."""
    arithmetic: str
    """"96 x 8 rows x 768 tokens x 1536 x 2 bytes"."""
    num_bytes: int
    """All of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """What one phase holds at its worst moment."""

    phase: Phase
    """The phase."""
    allocated_bytes: int
    """Tensor storages alive together at the peak."""
    by_category: Mapping[Category, int]
    """The same bytes by what they are held for."""
    where: str
    """The moment of the peak in words."""
    largest: tuple[TensorGroup, ...]
    """The largest groups of tensors at the peak, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Predicted bytes of a plan by phase."""

    phases: tuple[PhaseEstimate, ...]
    """In the order of the step."""

    @property
    def peak(self) -> PhaseEstimate:
        """The phase with the largest peak."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    @property
    def allocated_peak_bytes(self) -> int:
        """Largest sum of tensor storages alive together in the whole step."""
        return self.peak.allocated_bytes

    def of(self, phase: Phase) -> PhaseEstimate | None:
        """Return the estimate of `phase`; None if the step has no such phase."""
        return next((estimate for estimate in self.phases if estimate.phase is phase), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Peaks of one full-depth step of a plan on fake tensors."""

    peak_bytes: Mapping[Phase, int]
    """Allocated peak by phase."""
    seconds: float
    """How long the rehearsal took."""


def micro_batch_shape(workload: Workload, plan: Plan) -> Shape:
    """Return the shape of a micro-batch of `plan` whose rows are all at the length caps."""
    return Shape(
        rows=plan.micro_batch,
        tokens=workload.num_tokens,
        completion=workload.max_completion_length,
        chunk=min(plan.logprob_chunk_tokens, plan.micro_batch * workload.max_completion_length),
    )


def optimizer_state_bytes(weights: Weights, workload: Workload) -> int:
    """Return the bytes of optimizer state on the card after the first step."""
    row = optimizer_row(workload.optimizer)
    return round(
        weights.num_trainable * row.state_bytes_per_parameter
        + weights.num_trainable_tensors * STEP_COUNTER_BYTES
    )


def estimate_memory(footprint: Footprint, workload: Workload, plan: Plan) -> MemoryEstimate:
    """Return the predicted bytes of one update of `workload` under `plan`, at its length caps."""
    question = Standing(footprint=footprint, workload=workload, offload=plan.offload)
    shape = micro_batch_shape(workload, plan)
    phases = [_static_phase(Phase.LOAD, question, where="weights on the card")]
    phases.append(
        estimate_rollout(
            question,
            rows=plan.rollout_batch,
            prompt=workload.max_prompt_length,
            completion=workload.max_completion_length,
        )
    )
    if workload.needs_logprob_phase:
        phases.append(estimate_logprob(question, shape))
    phases.extend(
        estimate_micro_batch(
            question,
            shape,
            phase=phase,
            checkpointing=plan.gradient_checkpointing,
            has_earlier=plan.gradient_accumulation_steps > 1,
        )
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    phases.append(estimate_step(question))
    return MemoryEstimate(phases=tuple(phases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What stays on the card from phase to phase."""

    footprint: Footprint
    """What the trace learnt."""
    workload: Workload
    """The experiment."""
    offload: str = "none"
    """As in `Plan.offload`: elsewhere than "none", gradients and states leave the card."""

    def static_bytes(self, *, gradients: bool, states: bool) -> dict[Category, int]:
        """Return the bytes of weights, and of gradients and states if they exist on the card."""
        weights = self.footprint.weights
        static = {Category.PARAMETER: weights.parameter_bytes}
        if self.offload != "none":
            return static
        if gradients:
            static[Category.GRADIENT] = weights.gradient_bytes
        if states:
            static[Category.OPTIMIZER_STATE] = optimizer_state_bytes(weights, self.workload)
        return static


def estimate_rollout(
    standing: Standing, *, rows: int, prompt: int, completion: int
) -> PhaseEstimate:
    """Return the bytes of sampling `rows` completions at once, at these lengths in tokens."""
    moments = [("prefill", Shape(rows=rows, tokens=prompt))]
    if completion > 1:
        # The last token is drawn from a cache of all tokens but itself, one of them just fed.
        moments.append(("decode", Shape(rows=rows, tokens=prompt + completion - 2)))
    return _worst(Phase.ROLLOUT, standing, moments)


def estimate_logprob(standing: Standing, shape: Shape) -> PhaseEstimate:
    """Return the bytes of scoring a micro-batch of `shape` without gradient."""
    return _worst(Phase.LOGPROB, standing, [("logprob", shape)])


def estimate_micro_batch(
    standing: Standing, shape: Shape, *, phase: Phase, checkpointing: bool, has_earlier: bool
) -> PhaseEstimate:
    """Return the bytes of FORWARD or BACKWARD of a micro-batch of `shape`.

    `has_earlier`: an earlier micro-batch of the update has left its gradients.
    """
    gradients = Gradients.ACCUMULATING if has_earlier else Gradients.KEPT
    if standing.offload != "none":
        gradients = Gradients.LEAVING
    name = stage_name(phase.value, checkpointing=checkpointing, gradients=gradients)
    accumulating = gradients is Gradients.ACCUMULATING
    return _worst(phase, standing, [(name, shape)], gradients=accumulating)


def estimate_step(standing: Standing) -> PhaseEstimate:
    """Return the bytes of the optimizer's step: all static bytes, and what its kernels copy.

    Torch's foreach kernels copy the second moments of a block.
    """
    step = _static_phase(Phase.STEP, standing, where="gradients and states")
    if standing.offload != "none" or not _makes_temporaries(standing):
        return step
    weights = standing.footprint.weights
    num_bytes = max(weights.largest_gradient_bytes, min(BLOCK_BYTES, weights.gradient_bytes))
    return replace(
        step,
        allocated_bytes=step.allocated_bytes + num_bytes,
        by_category={**step.by_category, Category.TEMPORARY: num_bytes},
    )


def _makes_temporaries(standing: Standing) -> bool:
    return optimizer_row(standing.workload.optimizer).makes_temporaries


def _worst(
    phase: Phase, standing: Standing, moments: list[tuple[str, Shape]], *, gradients: bool = False
) -> PhaseEstimate:
    """Return the largest instant of the stages in `moments` over the phase's static bytes."""
    footprint = standing.footprint
    static = standing.static_bytes(gradients=gradients, states=True)
    instant, shape = max(
        (
            (instant, shape)
            for name, shape in moments
            for instant in footprint.stages[name].instants
        ),
        key=lambda pair: evaluate(pair[0].bytes, pair[1]),
    )
    by_category = dict(static)
    groups = []
    for index, count in instant.counts.items():
        term = footprint.terms[index]
        num_bytes = round(count * evaluate(term.bytes, shape))
        by_category[term.category] = by_category.get(term.category, 0) + num_bytes
        groups.append(_group(term, count, shape, num_bytes))
    groups.sort(key=lambda group: -group.num_bytes)
    return PhaseEstimate(
        phase=phase,
        allocated_bytes=sum(static.values()) + round(evaluate(instant.bytes, shape)),
        by_category=by_category,
        where=instant.where,
        largest=tuple(groups[:8]),
    )


def _static_phase(phase: Phase, standing: Standing, *, where: str) -> PhaseEstimate:
    stepping = phase is Phase.STEP
    static = standing.static_bytes(gradients=stepping, states=stepping)
    return PhaseEstimate(
        phase=phase,
        allocated_bytes=sum(static.values()),
        by_category=static,
        where=where,
        largest=(),
    )


def _group(term: Term, count: int, shape: Shape, num_bytes: int) -> TensorGroup:
    """Return `count` tensors of `term` with their arithmetic at `shape` in words."""
    arithmetic = term_arithmetic(term, shape)
    return TensorGroup(
        category=term.category,
        operation=term.operation,
        arithmetic=f"{count:,} tensors x {arithmetic}" if count > 1 else arithmetic,
        num_bytes=num_bytes,
    )


def term_arithmetic(term: Term, shape: Shape) -> str:
    """Return one tensor of `term` at `shape` in words: "8 rows x 768 tokens x 1536 x 2 bytes"."""
    parts = []
    for dimension in term.dimensions:
        value = getattr(shape, dimension, None)
        parts.append(
            dimension if value is None else f"{value:,} {_WORDS.get(dimension, dimension)}"
        )
    parts.append(f"{term.item_bytes} bytes")
    return " x ".join(parts)


_WORDS = {"completion": "completion tokens", "chunk": "tokens of a chunk"}
