"""Rewards to group-relative advantages.

Pure tensor arithmetic; knows nothing of prompts, models or losses.

Shape suffixes: R rows (completions), G groups of `num_generations` consecutive rows.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes are the tensors' documentation)

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_lite.errors import UsageError

SCALE_REWARDS = ("group", "batch", "none")

# TRL's constant: it bounds the advantage where a group's rewards nearly agree.
_STD_FLOOR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """The advantage of each row, and which groups have nothing to teach."""

    values_R: torch.Tensor
    """fp32; 0 for rows without a reward."""
    dead_G: torch.Tensor
    """bool; groups whose rewards are all equal (or missing): their advantages are exactly 0."""

    @property
    def dead_fraction(self) -> float:
        """Share of dead groups; reads the device."""
        return float(self.dead_G.float().mean())


def rewards_tensor(rewards: Sequence[float | None]) -> torch.Tensor:
    """Return rewards as fp64 [R], with NaN for None (a completion that nobody could score)."""
    return torch.tensor(
        [float("nan") if reward is None else float(reward) for reward in rewards],
        dtype=torch.float64,
    )


def group_advantages(
    rewards_R: torch.Tensor, *, num_generations: int, scale_rewards: str = "group"
) -> Advantages:
    """Return (reward - mean of its group) / (std + 1e-4), as TRL does.

    std is unbiased (n - 1).
    NaN is a missing reward: outside mean and std, advantage 0.
    A group whose rewards are all equal gets exactly 0, whatever rounding does to its mean.

    Args:
        rewards_R: any float dtype; rows of a group are consecutive.
        num_generations: rows in a group.
        scale_rewards: "group" (std of the group), "batch" (std of all rows) or "none".

    Raises:
        UsageError: the rows are not whole groups, `scale_rewards` is unknown, or a reward is
            infinite.
    """
    num_rows = rewards_R.numel()
    if num_generations < 2 or num_rows % num_generations:
        raise UsageError(
            f"{num_rows} rewards are not whole groups of {num_generations}; "
            "a group needs at least 2 completions"
        )
    if scale_rewards not in SCALE_REWARDS:
        raise UsageError(
            f"scale_rewards is {scale_rewards!r}; it must be one of {', '.join(SCALE_REWARDS)}"
        )
    if bool(torch.isinf(rewards_R).any()):
        raise UsageError("a reward is infinite; the mean of its group would be, too")
    # fp64: with rewards near 1e6 and differences near 1 fp32 would lose the differences.
    rewards_GN = rewards_R.double().view(-1, num_generations)
    known_GN = ~torch.isnan(rewards_GN)
    centred_GN = torch.where(known_GN, rewards_GN - _known_mean(rewards_GN, known_GN), 0.0)
    if scale_rewards == "group":
        centred_GN = centred_GN / (_known_std(rewards_GN, known_GN) + _STD_FLOOR)
    elif scale_rewards == "batch":
        std = _known_std(rewards_GN.view(1, -1), known_GN.view(1, -1))
        centred_GN = centred_GN / (std + _STD_FLOOR)
    highest_G = -_lowest(-rewards_GN, known_GN)
    dead_G = _lowest(rewards_GN, known_GN) >= highest_G
    values_GN = torch.where(dead_G[:, None], 0.0, centred_GN)
    return Advantages(values_R=values_GN.flatten().float(), dead_G=dead_G)


def _known_mean(rewards_GN: torch.Tensor, known_GN: torch.Tensor) -> torch.Tensor:
    count_G1 = known_GN.sum(1, keepdim=True).clamp(min=1)
    return torch.where(known_GN, rewards_GN, 0.0).sum(1, keepdim=True) / count_G1


def _known_std(rewards_GN: torch.Tensor, known_GN: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation [G, 1] of the known rewards; 0 for fewer than two."""
    mean_G1 = _known_mean(rewards_GN, known_GN)
    squares_GN = torch.where(known_GN, (rewards_GN - mean_G1).square(), 0.0)
    count_G1 = known_GN.sum(1, keepdim=True)
    return (squares_GN.sum(1, keepdim=True) / (count_G1 - 1).clamp(min=1)).sqrt()


def _lowest(rewards_GN: torch.Tensor, known_GN: torch.Tensor) -> torch.Tensor:
    return torch.where(known_GN, rewards_GN, float("inf")).amin(1)
