"""Discounted sums over the trainable tokens of a trajectory: masked spans neither decay nor count.

All work on flat columns at once: trainable tokens are gathered into a dense [S, longest] table, right-aligned in
time, and the recursion runs over its columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.objective.columns import token_trajectory

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.objective import BatchColumns

__all__ = ["discounted_returns", "last_token_rewards", "trainable_slots"]


def trainable_slots(columns: BatchColumns) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(trajectory, slot, width): where each trainable token stands in a dense [S, width] table, in token order."""
    owner = token_trajectory(columns.offsets)[columns.loss_mask]
    counts = columns.offsets.new_zeros(len(columns.offsets) - 1).index_add(0, owner, owner.new_ones(len(owner)))
    starts = counts.cumsum(0) - counts
    slot = owner.new_ones(len(owner)).cumsum(0) - 1 - starts[owner]
    return owner, slot, int(counts.max()) if len(counts) else 0


def last_token_rewards(columns: BatchColumns) -> torch.Tensor:
    """The episode's reward at the last trainable token of each of its trajectories, float64 [N], 0 elsewhere."""
    rewards = columns.rewards.new_zeros(len(columns.loss_mask)).double()
    positions = columns.loss_mask.nonzero()[:, 0]
    owner = token_trajectory(columns.offsets)[positions]
    last = owner.new_full((len(columns.offsets) - 1,), -1).scatter_reduce(
        0, owner, positions, "amax", include_self=True
    )
    trains = last >= 0
    rewards[last[trains]] = columns.rewards.double()[columns.episode_of[trains]]
    return rewards


def discounted_returns(columns: BatchColumns, token_rewards: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """G_t = r_t + γ · G_(next trainable token), float64 [N], 0 outside the mask."""
    owner, slot, width = trainable_slots(columns)
    table = token_rewards.new_zeros((len(columns.offsets) - 1, width)).double()
    table[owner, slot] = token_rewards.double()[columns.loss_mask]
    for t in range(width - 2, -1, -1):
        table[:, t] += gamma * table[:, t + 1]
    out = token_rewards.new_zeros(len(token_rewards)).double()
    out[columns.loss_mask] = table[owner, slot]
    return out
