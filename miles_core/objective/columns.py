"""Small operations on the global batch's flat columns that every estimator and correction needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.objective import BatchColumns

__all__ = ["segment_mean", "token_episode", "token_trajectory", "tokens_of"]


def token_trajectory(offsets: torch.Tensor) -> torch.Tensor:
    """Trajectory of each token, int64 [N]."""
    counts = offsets.diff()
    return counts.new_ones(len(counts)).cumsum(0).sub(1).repeat_interleave(counts)


def token_episode(columns: BatchColumns) -> torch.Tensor:
    """Episode of each token, int64 [N]."""
    return columns.episode_of[token_trajectory(columns.offsets)]


def tokens_of(offsets: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    """Token indices of these trajectories, concatenated in this order, int64 [n]."""
    counts = offsets.diff()[trajectories]
    ends = counts.cumsum(0)
    shift = (offsets[trajectories] - (ends - counts)).repeat_interleave(counts)
    return shift + shift.new_ones(len(shift)).cumsum(0) - 1


def segment_mean(values: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Mean of each trajectory's masked values, [S]; 0 where nothing is masked in. Differentiable."""
    owner = token_trajectory(offsets)
    kept = values.where(mask, values.new_zeros(()))
    sums = values.new_zeros(len(offsets) - 1).index_add(0, owner, kept)
    counts = values.new_zeros(len(offsets) - 1).index_add(0, owner, mask.to(values.dtype))
    return sums / counts.clamp(min=1)
