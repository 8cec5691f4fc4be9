"""How old tokens are, and what becomes of those that are too old. Pure functions."""

from __future__ import annotations

import dataclasses

import numpy as np

from miles_core.data.group import Episode, Group
from miles_core.data.trajectory import Trajectory

__all__ = ["fresh_episodes", "reweighted", "span_of"]


def span_of(group: Group) -> tuple[int, int] | None:
    """Oldest and newest version among the group's tokens that train; None when none does."""
    trajectories = group.trajectories
    if not trajectories:
        return None
    versions = np.concatenate([t.versions for t in trajectories])[np.concatenate([t.loss_mask for t in trajectories])]
    return (int(versions.min()), int(versions.max())) if len(versions) else None


def fresh_episodes(group: Group, *, oldest_allowed: int) -> dict[int, Episode]:
    """The episodes, by index, in which no token that trains is older than version `oldest_allowed`."""
    return {
        index: episode
        for index, episode in enumerate(group.episodes)
        if all(bool((t.versions[t.loss_mask] >= oldest_allowed).all()) for t in episode.trajectories)
    }


def reweighted(group: Group, *, oldest_allowed: int, decay: float) -> Group:
    """The group with its tokens older than version `oldest_allowed` weighing `decay` to the power of the versions over
    the bound. With `decay` 0 they leave the loss mask: they are in no numerator and in no denominator."""
    episodes = tuple(
        dataclasses.replace(e, trajectories=tuple(_reweighted(t, oldest_allowed, decay) for t in e.trajectories))
        for e in group.episodes
    )
    return dataclasses.replace(group, episodes=episodes)


def _reweighted(trajectory: Trajectory, oldest_allowed: int, decay: float) -> Trajectory:
    over = np.where(trajectory.loss_mask, np.maximum(oldest_allowed - trajectory.versions, 0), 0)
    if not over.any():
        return trajectory
    if decay == 0:
        return dataclasses.replace(trajectory, loss_mask=trajectory.loss_mask & (over == 0))
    weights = np.float32(decay) ** over.astype(np.float32)
    if trajectory.weights is not None:
        weights = weights * trajectory.weights
    return dataclasses.replace(trajectory, weights=weights.astype(np.float32))
