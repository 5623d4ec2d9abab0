"""The words of the house: what a Workload and a Plan refuse, and what they say of themselves."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans, workloads

from grpo_lite.errors import UsageError
from grpo_lite.plan import Plan, Workload, require_runnable

PLAN = Plan(
    micro_batch=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    logprob_chunk_tokens=64,
    rollout_batch=8,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "lorra"),
        ("dtype", "float16"),
        ("loss_type", "ppo"),
        ("prompts_per_step", 0),
        ("prompts_per_step", True),
        ("num_generations", 1),
        ("max_prompt_length", 2.0),
        ("max_completion_length", -1),
        ("num_iterations", 0),
        ("lora_rank", 0),
        ("beta", -0.1),
        ("beta", float("nan")),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("epsilon", -0.1),
        ("epsilon", 1.5),
        ("epsilon_high", float("nan")),
    ],
)
def test_a_workload_that_cannot_be_meant_is_refused_by_field(field, value):
    """NaN passes every "less than": it would be found in the weights, hours later."""
    with pytest.raises(UsageError, match=field):
        Workload(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("micro_batch", 0),
        ("gradient_accumulation_steps", 1.5),
        ("logprob_chunk_tokens", False),
        ("rollout_batch", -8),
        ("offload", "tape"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_by_field(field, value):
    with pytest.raises(UsageError, match=field):
        replace(PLAN, **{field: value})


def test_a_reference_model_beside_full_fine_tuning_is_refused_before_anything_is_loaded():
    """A second copy of the weights is not planned for: it would be an out-of-memory at step one."""
    with pytest.raises(UsageError, match="full fine-tuning"):
        require_runnable(Workload(method="full", beta=0.04))
    require_runnable(Workload(method="lora", beta=0.04))
    require_runnable(Workload(method="full"))


@settings(deadline=None)
@given(workload=workloads, data=st.data())
def test_changes_say_exactly_how_to_get_from_one_plan_to_the_other(workload, data):
    """The log of a rescue is these pairs: what they leave out nobody will know."""
    here, there = data.draw(plans(workload)), data.draw(plans(workload))
    changes = here.changes_to(there)
    assert replace(here, **{name: after for name, (_, after) in changes.items()}) == there
    assert all(getattr(here, name) == before != after for name, (before, after) in changes.items())
    assert here.changes_to(here) == {}


def test_reasons_explain_a_plan_and_are_no_part_of_what_it_is():
    """Equal plans with other reasons must be found again in caches and sets."""
    told = PLAN.with_reasons(micro_batch="8 do not fit").with_reasons(rollout_batch="all at once")
    assert told == PLAN
    assert hash(told) == hash(PLAN)
    assert told.reasons == {"micro_batch": "8 do not fit", "rollout_batch": "all at once"}
    assert PLAN.reasons == {}
    assert PLAN.changes_to(told) == {}


@pytest.mark.parametrize("thing", [PLAN, Workload()])
def test_what_is_decided_is_never_changed_in_place(thing):
    """A plan that changes behind the log's back makes the log a lie."""
    name = next(iter(type(thing).__slots__))
    with pytest.raises(FrozenInstanceError):
        setattr(thing, name, getattr(thing, name))


@given(workload=workloads)
def test_a_workload_counts_its_rows_tokens_and_scorings(workload):
    assert workload.num_rows == workload.prompts_per_step * workload.num_generations
    assert workload.num_tokens == workload.max_prompt_length + workload.max_completion_length
    assert workload.needs_logprob_phase == (workload.num_iterations > 1 or workload.beta > 0)
