"""Rewards to advantages: what a group says about its rows, and what it must not."""

import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lite.errors import UsageError
from grpo_lite.grpo.advantages import SCALE_REWARDS, group_advantages, rewards_tensor

rewards_of_groups = st.integers(2, 6).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(
            st.lists(st.floats(-50, 50), min_size=size, max_size=size), min_size=1, max_size=4
        ),
    )
)


def advantages(rewards, size, **options):
    return group_advantages(rewards_tensor(rewards), num_generations=size, **options)


def test_two_of_four_right_gives_the_unbiased_standard_score():
    """With the biased std (n) it would be 0.9998: other trainers have shipped that."""
    values = advantages([1, 0, 0, 1], 4).values_R
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx([0.8659, -0.8659, -0.8659, 0.8659], abs=1e-4)
    exact = 0.5 / (statistics.stdev([1, 0, 0, 1]) + 1e-4)
    assert values[0].item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("scale_rewards", SCALE_REWARDS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e6 + 0.1])
def test_an_all_equal_group_gets_exactly_zero(reward, scale_rewards):
    """Three times 0.1 over three is not 0.1: a mean's rounding over 1e-4 would be an advantage.

    The other group differs, so that "batch" has a std to divide by.
    """
    result = advantages([reward] * 3 + [1, 2, 3], 3, scale_rewards=scale_rewards)
    assert result.values_R[:3].tolist() == [0.0] * 3
    assert result.values_R[3:].abs().max() > 0
    assert result.dead_G.tolist() == [True, False]
    assert result.dead_fraction == 0.5


@given(rewards_of_groups, st.sampled_from(SCALE_REWARDS))
def test_advantages_of_a_group_sum_to_zero_and_follow_the_rewards(case, scale_rewards):
    """A baseline that is not the group's own mean pushes every row the same way."""
    size, groups = case
    rewards = [reward for group in groups for reward in group]
    values = advantages(rewards, size, scale_rewards=scale_rewards).values_R.double()
    for group, own in zip(groups, values.view(-1, size).tolist(), strict=True):
        assert sum(own) == pytest.approx(0, abs=1e-5 * max(1, max(map(abs, own)) * size))
        pairs = sorted(zip(group, own, strict=True))
        assert all(a[1] <= b[1] + 1e-9 for a, b in pairwise(pairs))


@given(rewards_of_groups, st.sampled_from(SCALE_REWARDS))
def test_advantages_are_the_plain_formula(case, scale_rewards):
    """The dense twin, in the standard library's arithmetic."""
    size, groups = case
    rewards = [reward for group in groups for reward in group]
    got = advantages(rewards, size, scale_rewards=scale_rewards).values_R.tolist()
    wanted = []
    for group in groups:
        std = {
            "group": lambda group=group: statistics.stdev(group) + 1e-4,
            "batch": lambda: statistics.stdev(rewards) + 1e-4,
            "none": lambda: 1.0,
        }[scale_rewards]()
        mean = statistics.fmean(group)
        wanted += [0.0 if max(group) == min(group) else (r - mean) / std for r in group]
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("scale_rewards", SCALE_REWARDS)
def test_a_missing_reward_is_outside_the_baseline_and_gets_no_advantage(scale_rewards):
    """As 0 it would move the group's mean, and give the unscored row a penalty."""
    result = advantages([1, None, 0, 5, None, 8], 3, scale_rewards=scale_rewards)
    values = result.values_R.tolist()
    assert values[1] == values[4] == 0.0
    assert values[0] == pytest.approx(-values[2])
    divisor = {
        "group": statistics.stdev([1, 0]) + 1e-4,
        "batch": statistics.stdev([1, 0, 5, 8]) + 1e-4,
        "none": 1.0,
    }[scale_rewards]
    assert values[0] == pytest.approx(0.5 / divisor, rel=1e-5)


def test_groups_with_one_reward_or_none_are_dead_and_finite():
    """A std of one value is 0 / 0; NaN in one advantage is NaN in every weight."""
    result = advantages([None, None, 3, None, 1, 2], 2)
    assert result.values_R[:4].tolist() == [0.0] * 4
    assert result.dead_G.tolist() == [True, True, False]
    assert torch.isfinite(result.values_R).all()


def test_small_differences_of_large_rewards_survive():
    """In fp32 a reward of 1e8 + 1 is 1e8: the group would look dead."""
    result = advantages([1e8, 1e8 + 1], 2)
    assert result.values_R.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-3)


@pytest.mark.parametrize(
    ("rewards", "size", "options", "says"),
    [
        ([1, 0, 1], 2, {}, "3 rewards are not whole groups of 2"),
        ([1, 0], 1, {}, "at least 2"),
        ([1, 0], 2, {"scale_rewards": "std"}, "'std'"),
        ([math.inf, 0], 2, {}, "infinite"),
    ],
)
def test_what_cannot_be_meant_is_refused(rewards, size, options, says):
    with pytest.raises(UsageError, match=says):
        advantages(rewards, size, **options)
