"""The global batch as the flat columns that an objective reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from miles_core.contracts.objective import BatchColumns
from miles_core.data.group import Batch
from miles_core.data.trajectory import Status, Trajectory

__all__ = ["batch_columns", "training_trajectories"]


def training_trajectories(batch: Batch) -> list[Trajectory]:
    """Trajectories of the batch that train, in order: those of failed episodes are kept for inspection only."""
    return [t for e in batch.episodes if e.status is not Status.FAILED for t in e.trajectories]


def batch_columns(batch: Batch, *, reward_key: str | None = None) -> BatchColumns:
    """Flat columns over `training_trajectories(batch)`. Raises `ValueError` for a missing or non-finite reward."""
    trajectories = training_trajectories(batch)
    episodes: dict[str, int] = {}
    groups: dict[str, int] = {}
    rewards: list[float] = []
    group_of: list[int] = []
    for trajectory in trajectories:
        if trajectory.episode_id not in episodes:
            episodes[trajectory.episode_id] = len(episodes)
            rewards.append(trajectory.scalar_reward(reward_key))
            group_of.append(groups.setdefault(trajectory.group_id, len(groups)))
    lengths = [len(t) for t in trajectories]
    return BatchColumns(
        offsets=torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)], dtype=torch.int64),
        episode_of=torch.tensor([episodes[t.episode_id] for t in trajectories], dtype=torch.int64),
        group_of=torch.tensor(group_of, dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        truncated=torch.tensor([t.status is Status.TRUNCATED for t in trajectories], dtype=torch.bool),
        loss_mask=_joined([t.loss_mask for t in trajectories], np.bool_),
        rollout_logprobs=_joined([t.logprobs for t in trajectories], np.float32),
        versions=_joined([t.versions for t in trajectories], np.int32),
        policy_version=batch.policy_version,
        weights=_weights(trajectories),
        teacher_logprobs=_teacher([t.teacher_logprobs for t in trajectories]),
        teacher_top_ids=None if (ids := _teacher([t.teacher_top_ids for t in trajectories])) is None else ids.long(),
        teacher_top_logprobs=_teacher([t.teacher_top_logprobs for t in trajectories]),
        trajectory_ids=tuple(t.trajectory_id for t in trajectories),
    )


def _weights(trajectories: list[Trajectory]) -> torch.Tensor | None:
    """How much each token counts, where any trajectory says so."""
    if all(t.weights is None for t in trajectories):
        return None
    return _joined([np.ones(len(t), np.float32) if t.weights is None else t.weights for t in trajectories], np.float32)


def _teacher(parts: Sequence[NDArray[np.generic] | None]) -> torch.Tensor | None:
    """A column of the teacher's, where every trajectory has one."""
    columns = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(columns)) if columns and len(columns) == len(parts) else None


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=dtype))
