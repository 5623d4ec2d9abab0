"""Our own update, broken at any allocation or squeezed by a moving budget: the same weights."""

import random
from dataclasses import replace

import pytest
from loop_rig import FaultyCard, flat

from grpo_lite.plan import Phase
from grpo_lite.search import least_memory

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, at transformers
our_rig = pytest.importorskip("our_rig", reason="needs transformers")


def run(card, workload, at=None):
    """Return how far two updates move the weights, and the loop."""
    loop = our_rig.OurLoop(card, workload=workload)
    before = flat(loop.model)
    with card.attach():
        card.arm(at)
        loop.updates(2)
        card.at = None
    return flat(loop.model) - before, loop


@pytest.mark.parametrize(
    "workload",
    [
        our_rig.tiny_workload(),
        our_rig.tiny_workload(method="lora", beta=0.1, num_iterations=1),
    ],
    ids=["two iterations", "lora with a reference"],
)
def test_an_out_of_memory_at_any_allocation_ends_in_the_same_update(workload):
    """Thousands of points are attacked in benchmarks/bench_faults.py; here some, in every phase."""
    card = FaultyCard()
    wanted, _ = run(card, workload)
    for at in random.Random(1).sample(range(1, card.count + 1), 6):
        faulty = FaultyCard()
        moved, loop = run(faulty, workload, at)
        assert faulty.fired
        assert float((moved - wanted).norm()) <= 1e-4 * float(wanted.norm()), at
        assert len(loop.decisions) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loop_obeys_its_plan_so_that_what_was_predicted_is_measured(checkpointing):
    """A plan that fits only with checkpointing is no plan where the loop does not switch it on."""
    workload = our_rig.tiny_workload()
    loop = our_rig.OurLoop(FaultyCard(), workload=workload)
    loop.governor.plan = replace(loop.governor.plan, gradient_checkpointing=checkpointing)
    with loop.card.attach():
        loop.updates(2)
    for phase in (Phase.LOGPROB, Phase.FORWARD, Phase.BACKWARD):
        record = loop.governor.records[phase]
        assert record.measured_bytes == pytest.approx(record.predicted_bytes, rel=0.005), phase


def test_a_budget_that_moves_loses_no_update_and_no_byte():
    """Between what the smallest plan needs and twice that, drawn anew every few updates."""
    workload = our_rig.tiny_workload(num_iterations=1)
    card = FaultyCard()
    loop = our_rig.OurLoop(card, workload=workload)
    least = least_memory(loop.governor.question.footprint, workload).allocated_peak_bytes
    chance = random.Random(0)
    with card.attach():
        loop.updates(2)
        loop.governor.begin_update(3)
        resting_bytes = card.allocated_bytes()
        for step in range(3, 43):
            if step % 4 == 3:
                card.budget_bytes = chance.randint(round(1.03 * least), 2 * least)
            loop.update(step)
        assert card.allocated_bytes() == resting_bytes
    assert loop.decisions
