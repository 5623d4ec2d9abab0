"""Placement: budgets kept, priorities obeyed, costs that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lite.errors import UsageError
from grpo_lite.offload.blocks import ParameterShape, lay_out
from grpo_lite.offload.placement import (
    OffloadBudget,
    Tier,
    place,
    priority_order,
    sweep,
    tier_bytes,
)

LAYOUT = lay_out(
    [
        ParameterShape(name=f"p{i}", num_elements=100_000, element_bytes=2, identity=i)
        for i in range(12)
    ],
    block_bytes=100_000,
)
EVERYTHING = 16 * sum(block.num_elements for block in LAYOUT.blocks)
LARGEST = LAYOUT.largest_gradient_bytes


def placed(card=LARGEST, host=2**40, disk=2**40, order=None):
    budget = OffloadBudget(card_bytes=card, host_bytes=host, disk_bytes=disk)
    return place(LAYOUT, budget, order or priority_order(LAYOUT))


@given(card=st.integers(LARGEST, LARGEST + EVERYTHING + 10), host=st.integers(0, 2 * EVERYTHING))
def test_a_placement_keeps_every_budget_or_is_refused(card, host):
    """A plan over budget is an out-of-memory three hours later."""
    try:
        placement = placed(card, host)
    except UsageError:
        return
    needed = tier_bytes(LAYOUT, placement)
    assert needed.card_bytes <= card
    assert needed.host_bytes <= host


@given(host=st.integers(3 * 2**20, EVERYTHING), more=st.integers(0, EVERYTHING))
def test_more_ram_never_means_more_disk_writes(host, more):
    try:
        less = tier_bytes(LAYOUT, placed(host=host)).disk_written_bytes
    except UsageError:
        return
    assert tier_bytes(LAYOUT, placed(host=host + more)).disk_written_bytes <= less


def test_the_hint_of_a_refused_host_budget_works():
    with pytest.raises(UsageError, match="need") as refused:
        placed(host=2**20, disk=0)
    host = int(refused.value.hint.split("host_bytes=")[1].split()[0])
    assert placed(host=host, disk=0).blocks_with_state(Tier.HOST)
    with pytest.raises(UsageError):
        placed(host=host - 1, disk=0)


def test_states_go_to_disk_before_gradients_do():
    """Gradients are read and written once per micro-batch, states once per step."""
    roomy = EVERYTHING // 2
    placement = placed(host=roomy)
    assert placement.blocks_with_state(Tier.DISK)
    assert placement.blocks_with_state(Tier.HOST)
    assert not placement.blocks_with_gradient(Tier.DISK)
    tight = placed(host=2 * 2**20 + 12 * 3 * 51_000 + 2 * 4 * 52_000)
    assert tight.blocks_with_gradient(Tier.DISK)


def test_the_first_layers_stay_on_the_card_and_importance_decides_among_near_ones():
    num_blocks = len(LAYOUT.blocks)
    plain = priority_order(LAYOUT)
    assert plain[0] == num_blocks - 1
    importance = [0.0] * num_blocks
    importance[num_blocks - 2] = 1.0
    assert priority_order(LAYOUT, importance)[0] == num_blocks - 2
    importance = [0.0] * num_blocks
    importance[0] = 1.0
    assert priority_order(LAYOUT, importance)[0] == num_blocks - 1


def test_a_smaller_card_budget_moves_only_the_lowest_priorities():
    order = priority_order(LAYOUT)
    each = 16 * LAYOUT.blocks[0].num_elements
    wide = set(placed(card=LARGEST + 8 * each).blocks_with_state(Tier.CARD))
    narrow = set(placed(card=LARGEST + 5 * each).blocks_with_state(Tier.CARD))
    assert narrow < wide
    assert narrow == set(order[: len(narrow)])


def test_costs_count_each_tier_once():
    placement = placed(host=EVERYTHING // 2)
    needed = tier_bytes(LAYOUT, placement, accumulation_steps=4)
    disk = sum(LAYOUT.blocks[i].state_bytes for i in placement.blocks_with_state(Tier.DISK))
    assert disk <= needed.disk_written_bytes < disk * 1.02
    assert needed.disk_bytes == 2 * needed.disk_written_bytes
    assert needed.link_to_card_bytes == sum(block.gradient_bytes for block in LAYOUT.blocks)
    assert needed.link_to_host_bytes == 4 * needed.link_to_card_bytes


def test_a_card_budget_below_the_largest_gradient_is_refused_by_name():
    with pytest.raises(UsageError, match="gradient of p"):
        placed(card=LARGEST - 1)


def test_a_disk_that_is_too_small_is_refused():
    with pytest.raises(UsageError, match="disk tier needs"):
        placed(host=EVERYTHING // 2, disk=1000)


def test_negative_budgets_are_refused():
    with pytest.raises(UsageError, match="host_bytes is -1"):
        OffloadBudget(card_bytes=0, host_bytes=-1)


def test_sweeps_visit_all_blocks_in_alternating_direction_with_the_disk_always_busy():
    """A sweep that begins where the last one ended finds its blocks still in the buffers."""
    placement = placed(host=EVERYTHING // 2)
    there, back = sweep(placement, 0), sweep(placement, 1)
    assert back == there[::-1]
    assert sorted(there) == list(range(len(LAYOUT.blocks)))
    disk = set(placement.blocks_with_state(Tier.DISK))
    half = there[: len(there) // 2]
    share = len([index for index in half if index in disk]) / len(disk)
    assert 0.4 < share < 0.6
