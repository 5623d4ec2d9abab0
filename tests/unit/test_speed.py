"""Predicted seconds: measured figures as they are, datasheets by a stated share, times that add."""

from dataclasses import replace

import pytest

from grpo_lite.cards.profile import Figure, virtual_profile
from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import Footprint, Instant, Stage, Weights, Work
from grpo_lite.predict.speed import LAUNCH_S, Tiers, assumptions, estimate_speed

ROWS = (1, 0, 0, 0, 0)
NAMES = (
    "prefill",
    "decode",
    "forward",
    "backward",
    "forward/checkpointed",
    "backward/checkpointed",
)
WORKLOAD = Workload(
    dtype="float32",
    prompts_per_step=1,
    num_generations=4,
    max_prompt_length=8,
    max_completion_length=3,
)
PLAN = Plan(
    micro_batch=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
    logprob_chunk_tokens=6,
    rollout_batch=4,
)


def footprint(*, flops=0.0, moved_bytes=0.0, num_operations=0):
    """A model each of whose stages does this much for each row."""
    stage = Stage(
        instants=(Instant(where="x", counts={}, bytes={}),),
        work=Work(
            flops={ROWS: flops}, moved_bytes={ROWS: moved_bytes}, num_operations=num_operations
        ),
    )
    return Footprint(
        model="m",
        weights=Weights(
            num_parameters=1000,
            num_trainable=1000,
            num_trainable_tensors=1,
            parameter_bytes=4000,
            gradient_bytes=4000,
            largest_gradient_bytes=4000,
        ),
        terms=(),
        stages=dict.fromkeys(NAMES, stage),
        num_layers=1,
        traced_layers=1,
        versions={},
    )


def figure(value, source="measured"):
    return Figure(value=value, source=source, note="x")


def profile(source, **changes):
    made = replace(
        virtual_profile("virtual:1GiB", 2**30),
        flops_per_s={"float32": figure(1e9, source), "bfloat16": figure(1e9, source)},
        memory_bandwidth_bytes_per_s=figure(1e9, source),
        launch_s=figure(1e-3) if source == "measured" else None,
    )
    return replace(made, **changes)


def seconds_of(phase, footprint, profile, **tiers):
    speed = estimate_speed(footprint, WORKLOAD, PLAN, profile, **tiers)
    return next(part for part in speed.phases if part.phase is phase)


def test_a_measured_rate_is_taken_as_it_is_and_a_datasheets_by_half():
    """The danger: a profile whose owner measured it, discounted once more."""
    work = footprint(flops=1e9)
    # two micro-batches of two rows
    assert seconds_of(Phase.FORWARD, work, profile("measured")).seconds == pytest.approx(4.0)
    assert seconds_of(Phase.FORWARD, work, profile("datasheet")).seconds == pytest.approx(8.0)


def test_arithmetic_traffic_and_launches_add_up():
    work = footprint(flops=1e9, moved_bytes=2e9, num_operations=100)
    forward = seconds_of(Phase.FORWARD, work, profile("measured"))
    assert forward.seconds == pytest.approx(4.0 + 8.0 + 2 * 100 * 1e-3)
    assert forward.bound_by == "bandwidth"


def test_launches_bound_a_small_model():
    forward = seconds_of(Phase.FORWARD, footprint(num_operations=10), profile("datasheet"))
    assert forward.bound_by == "launch"
    assert forward.seconds == pytest.approx(2 * 10 * LAUNCH_S)


def test_a_rollout_prefills_once_and_decodes_all_but_the_first_token():
    rollout = seconds_of(Phase.ROLLOUT, footprint(flops=1e9), profile("measured"))
    assert rollout.seconds == pytest.approx(4 * (1 + 2))


def test_a_step_off_the_card_reads_and_writes_the_disk_at_its_own_rates():
    tiers = Tiers(
        host_bytes=0,
        disk_bytes=0,
        link_bytes_per_micro_batch=0,
        link_bytes_per_step=0,
        num_parameters=0,
        disk_read_bytes=10**9,
        disk_written_bytes=10**9,
    )
    measured = profile(
        "measured", disk_read_bytes_per_s=figure(2e9), disk_write_bytes_per_s=figure(5e8)
    )
    step = seconds_of(Phase.STEP, footprint(), measured, tiers=tiers)
    assert step.seconds == pytest.approx(0.5 + 2.0)
    assert step.bound_by == "disk"


def test_a_report_says_whether_its_times_rest_on_measurements():
    assert "measured by `grpo-lite profile`" in assumptions(profile("measured"), "float32")[0]
    half = profile("measured", launch_s=None)
    for other in (profile("datasheet"), half):
        assert "assumed" in assumptions(other, "float32")[0]
    assert "reward functions" in assumptions(profile("datasheet"), "float32")[1]
