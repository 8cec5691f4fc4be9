"""Group-relative advantages (GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import AdvantageEstimator, Advantages, BatchColumns
from miles_core.objective.columns import token_episode

if TYPE_CHECKING:
    import torch

__all__ = ["Grpo", "GrpoConfig", "group_advantages"]

EPSILON = 1e-6
NOISE = 1e-6
"""Rewards of a group that differ by at most this part of the largest magnitude are equal: float noise is no signal."""


class GrpoConfig(ComponentConfig):
    """Section of `grpo` and of the estimators that share its advantages."""

    scale: Literal["group", "none", "batch"] = "group"
    """Divide the centred reward by the group's standard deviation, by the batch's, or leave it (Dr. GRPO)."""

    leave_one_out: bool = False
    """Centre on the mean of the *other* episodes of the group (RLOO)."""


class Grpo(AdvantageEstimator[GrpoConfig]):
    """One advantage an episode, the same for all its trainable tokens."""

    Config = GrpoConfig

    def estimate(self, columns: BatchColumns) -> Advantages:
        per_episode, metrics = group_advantages(
            columns.rewards,
            columns.group_of,
            scale=self.config.scale,
            leave_one_out=self.config.leave_one_out,
        )
        per_token = per_episode[token_episode(columns)].float()
        return Advantages(advantages=per_token.where(columns.loss_mask, per_token.new_zeros(())), metrics=metrics)


def group_advantages(
    rewards: torch.Tensor,
    group_of: torch.Tensor,
    *,
    scale: Literal["group", "none", "batch"] = "group",
    leave_one_out: bool = False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(R − mean_g) / (std_g + 1e-6), std unbiased, float64 [E].

    `rewards` [E] and `group_of` int64 [E] are one an episode; groups are found by id and may have any size. 0 for a
    group of one episode and for a group whose rewards are equal up to float noise.
    """
    rewards = rewards.double()
    episodes = len(rewards)
    if episodes == 0:
        return rewards, {"advantage/flat_groups": 0.0}
    groups = int(group_of.max()) + 1
    zeros = rewards.new_zeros(groups)
    size = zeros.index_add(0, group_of, rewards.new_ones(episodes))
    mean = zeros.index_add(0, group_of, rewards) / size.clamp(min=1)
    centred = rewards - mean[group_of]
    std = (zeros.index_add(0, group_of, centred.square()) / (size - 1).clamp(min=1)).sqrt()
    highest = zeros.scatter_reduce(0, group_of, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group_of, rewards, "amin", include_self=False)
    largest = zeros.scatter_reduce(0, group_of, rewards.abs(), "amax", include_self=False)
    flat = (size < 2) | ((highest - lowest <= NOISE * largest) & largest.isfinite())

    advantages = centred
    if leave_one_out:  # R − mean of the others = (R − mean) · n / (n − 1)
        advantages = centred * (size / (size - 1).clamp(min=1))[group_of]
    if scale == "group":
        advantages = advantages / (std[group_of] + EPSILON)
    elif scale == "batch":
        spread = rewards.std() if episodes > 1 else rewards.new_zeros(())
        advantages = advantages / (spread + EPSILON)
    metrics = {
        "advantage/flat_groups": float((flat & (size > 0)).sum()),
        "advantage/group_std": float(std[size > 0].mean()),
        "reward/mean": float(rewards.mean()),
    }
    return advantages.where(~flat[group_of], advantages.new_zeros(())), metrics
