"""Seconds of a plan by phase: the work that the trace counted over what the card does.

Eager operations run one after the other, so the times of arithmetic, of memory traffic and of
launching add up; a product costs the longer of its first two, and at either end the shorter of
them is small.
What `grpo-lite profile` measured is taken as it is; a datasheet's figure by an assumed fraction,
which every report shows.
Pure; knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_lite.cards.profile import CardProfile, Figure
from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import Footprint, Shape, Stage, evaluate, stage_name
from grpo_lite.predict.memory import micro_batch_shape, optimizer_state_bytes

ACHIEVED_FLOPS_FRACTION = 0.5
"""Assumed share of the profile's FLOP/s that whole transformer layers reach."""
ACHIEVED_BANDWIDTH_FRACTION = 0.7
"""Assumed share of the profile's memory bandwidth that streaming operations reach."""
LAUNCH_S = 8e-6
"""Assumed seconds to launch one operation from eager PyTorch."""

HOST_BYTES_PER_S = 2e10
"""Assumed RAM bandwidth that fused AdamW on the host reaches."""
HOST_ADAM_BYTES = 30
"""Traffic of one parameter's update on the host: gradient, master, two moments read, three written
and the rounded weight (4 + 12 read, 12 + 2 written)."""
DISK_BYTES_PER_S = 1e9
"""Assumed sum of reading and writing on a laptop's NVMe disk."""

REWARD_ASSUMPTION = "speed: the time of the reward functions is unknown and left out"
"""True of every prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpeed:
    """Predicted seconds of one phase of an update."""

    phase: Phase
    """The phase."""
    seconds: float
    """For the whole update."""
    bound_by: str
    """"compute", "bandwidth", "launch", "link", "host" or "disk": the largest part of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """Predicted seconds of one update."""

    phases: tuple[PhaseSpeed, ...]
    """In the order of the step."""
    num_completion_tokens: int
    """Completion tokens of one update at the cap."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole update."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens trained on per second."""
        return self.num_completion_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What gradients and optimizer state hold and move when they live off the card."""

    host_bytes: int
    """Held in RAM, buffers included."""
    disk_bytes: int
    """Held in files."""
    link_bytes_per_micro_batch: int
    """Gradients that leave the card in one micro-batch."""
    link_bytes_per_step: int
    """Weights that come back in one step."""
    num_parameters: int
    """Parameters that the host updates."""
    disk_read_bytes: int
    """Read from files in one step."""
    disk_written_bytes: int
    """Written to files in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float


def assumptions(profile: CardProfile, dtype: str) -> tuple[str, ...]:
    """Return in words what predictions of time on `profile` rest on."""
    if _is_measured(profile, dtype):
        return (
            "speed: this machine's own rates, measured by `grpo-lite profile`",
            REWARD_ASSUMPTION,
        )
    return (
        f"speed: {ACHIEVED_FLOPS_FRACTION:.0%} of the card's FLOP/s and "
        f"{ACHIEVED_BANDWIDTH_FRACTION:.0%} of its bandwidth are reached, "
        f"{LAUNCH_S * 1e6:.0f} us for each launched operation (assumed, not measured)",
        REWARD_ASSUMPTION,
    )


def _is_measured(profile: CardProfile, dtype: str) -> bool:
    figures = (profile.flops_per_s[dtype], profile.memory_bandwidth_bytes_per_s, profile.launch_s)
    return all(figure is not None and figure.source == "measured" for figure in figures)


def _achieved(figure: Figure, assumed_fraction: float) -> float:
    return figure.value * (1.0 if figure.source == "measured" else assumed_fraction)


def _rates(profile: CardProfile, dtype: str) -> _Rates:
    """Return what the card of `profile` reaches; a missing figure by its assumption."""
    link = profile.link_bytes_per_s or profile.memory_bandwidth_bytes_per_s

    def value(figure: Figure | None, otherwise: float) -> float:
        return otherwise if figure is None else figure.value

    return _Rates(
        flops_per_s=_achieved(profile.flops_per_s[dtype], ACHIEVED_FLOPS_FRACTION),
        bytes_per_s=_achieved(profile.memory_bandwidth_bytes_per_s, ACHIEVED_BANDWIDTH_FRACTION),
        launch_s=value(profile.launch_s, LAUNCH_S),
        link_bytes_per_s=_achieved(link, ACHIEVED_BANDWIDTH_FRACTION),
        host_bytes_per_s=value(profile.host_bandwidth_bytes_per_s, HOST_BYTES_PER_S),
        disk_read_bytes_per_s=value(profile.disk_read_bytes_per_s, DISK_BYTES_PER_S),
        disk_write_bytes_per_s=value(profile.disk_write_bytes_per_s, DISK_BYTES_PER_S),
    )


def estimate_speed(
    footprint: Footprint,
    workload: Workload,
    plan: Plan,
    profile: CardProfile,
    tiers: Tiers | None = None,
) -> SpeedEstimate:
    """Return the predicted seconds of one update of `workload` under `plan`, at its length caps.

    `tiers`: what moves where the plan's offload is not "none".
    """
    rates = _rates(profile, workload.dtype)
    shape = micro_batch_shape(workload, plan)
    phases = [_rollout(footprint, workload, plan, rates)]
    if workload.needs_logprob_phase:
        repeats = plan.gradient_accumulation_steps * (workload.beta > 0) + (
            plan.gradient_accumulation_steps * (workload.num_iterations > 1)
        )
        phases.append(_phase(Phase.LOGPROB, [(footprint.stages["logprob"], shape, repeats)], rates))
    repeats = plan.gradient_accumulation_steps * workload.num_iterations
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        name = stage_name(phase.value, checkpointing=plan.gradient_checkpointing)
        phases.append(_phase(phase, [(footprint.stages[name], shape, repeats)], rates))
    if tiers is None:
        phases.append(_step(footprint, workload, rates))
    else:
        phases.append(_host_step(workload, tiers, rates, repeats))
    return SpeedEstimate(
        phases=tuple(phases),
        num_completion_tokens=workload.num_rows * workload.max_completion_length,
    )


def _rollout(footprint: Footprint, workload: Workload, plan: Plan, rates: _Rates) -> PhaseSpeed:
    """Prefill once and decode token by token, with the cache at its mean length."""
    slices = math.ceil(workload.num_rows / plan.rollout_batch)
    mean_tokens = workload.max_prompt_length + workload.max_completion_length // 2
    prefill = Shape(rows=plan.rollout_batch, tokens=workload.max_prompt_length)
    decode = Shape(rows=plan.rollout_batch, tokens=mean_tokens)
    return _phase(
        Phase.ROLLOUT,
        [
            (footprint.stages["prefill"], prefill, slices),
            (footprint.stages["decode"], decode, slices * (workload.max_completion_length - 1)),
        ],
        rates,
    )


def _phase(phase: Phase, parts: list[tuple[Stage, Shape, int]], rates: _Rates) -> PhaseSpeed:
    seconds: dict[str, float] = {"compute": 0.0, "bandwidth": 0.0, "launch": 0.0}
    for stage, shape, repeats in parts:
        seconds["compute"] += repeats * evaluate(stage.work.flops, shape) / rates.flops_per_s
        traffic_s = evaluate(stage.work.moved_bytes, shape) / rates.bytes_per_s
        seconds["bandwidth"] += repeats * traffic_s
        seconds["launch"] += repeats * stage.work.num_operations * rates.launch_s
    return _phase_speed(phase, seconds)


def _step(footprint: Footprint, workload: Workload, rates: _Rates) -> PhaseSpeed:
    """Read weights, gradients and states, write weights and states."""
    weights = footprint.weights
    trained_bytes = 4 * weights.num_trainable
    state_bytes = optimizer_state_bytes(weights, workload)
    moved_bytes = 2 * trained_bytes + weights.gradient_bytes + 2 * state_bytes
    seconds = {
        "bandwidth": workload.num_iterations * moved_bytes / rates.bytes_per_s,
        "launch": workload.num_iterations * weights.num_trainable_tensors * rates.launch_s,
    }
    return _phase_speed(Phase.STEP, seconds)


def _host_step(
    workload: Workload, tiers: Tiers, rates: _Rates, num_micro_batches: int
) -> PhaseSpeed:
    """Bring gradients to the host, step there, stream states from disk, bring weights back.

    The copies of gradients are counted here as if nothing of them hid behind backward.
    """
    link_bytes = (
        num_micro_batches * tiers.link_bytes_per_micro_batch
        + workload.num_iterations * tiers.link_bytes_per_step
    )
    host_bytes = tiers.num_parameters * HOST_ADAM_BYTES
    disk_s = (
        tiers.disk_read_bytes / rates.disk_read_bytes_per_s
        + tiers.disk_written_bytes / rates.disk_write_bytes_per_s
    )
    return _phase_speed(
        Phase.STEP,
        {
            "link": link_bytes / rates.link_bytes_per_s,
            "host": workload.num_iterations * host_bytes / rates.host_bytes_per_s,
            "disk": workload.num_iterations * disk_s,
        },
    )


def _phase_speed(phase: Phase, seconds: Mapping[str, float]) -> PhaseSpeed:
    return PhaseSpeed(
        phase=phase,
        seconds=sum(seconds.values()),
        bound_by=max(seconds, key=lambda part: seconds[part]),
    )
