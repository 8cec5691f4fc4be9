"""Episodes, groups and batches: the units of scoring, scheduling and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from miles_core.data.trajectory import Status, Trajectory

__all__ = ["Batch", "Episode", "Group", "Prompt"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One task instance from a data source.

    `messages` is what the model is asked (chat messages); `label` the reference answer, if any; `metadata` the
    rest of the row, for rewards and environments. `prompt_id` is stable: a function of source, epoch and row.
    """

    prompt_id: str
    messages: tuple[Mapping[str, Any], ...]
    label: Any = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One attempt at a prompt: one trajectory (linear) or several (branching, one a leaf), one reward.

    `error` says why a `failed` episode failed. `metrics` are numbers for the report (tool seconds, turns, …).
    `messages` is the whole conversation, prompt included, for rewards and for reading; empty when nothing was said.
    """

    episode_id: str
    prompt_id: str
    group_id: str
    status: Status
    trajectories: tuple[Trajectory, ...]
    reward: float | Mapping[str, float] | None = None
    error: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if trajectory.episode_id != self.episode_id or trajectory.group_id != self.group_id:
                raise ValueError(
                    f"trajectory {trajectory.trajectory_id} carries episode {trajectory.episode_id} and group "
                    f"{trajectory.group_id}, but stands in episode {self.episode_id} of group {self.group_id}"
                )

    def with_reward(self, reward: float | Mapping[str, float]) -> Episode:
        """The same episode, its reward written on every one of its trajectories."""
        scored = tuple(t.with_reward(reward) for t in self.trajectories)
        return dataclasses.replace(self, trajectories=scored, reward=reward)

    def as_failed(self, error: str) -> Episode:
        """The same episode, marked failed: its trajectories are kept for inspection and never train."""
        return dataclasses.replace(self, status=Status.FAILED, error=error)

    @property
    def oldest_version(self) -> int | None:
        versions = [v for t in self.trajectories if (v := t.oldest_version) is not None]
        return min(versions) if versions else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The episodes of one prompt: the unit of scheduling, buffering, dropping and reward normalisation."""

    group_id: str
    prompt: Prompt
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        for episode in self.episodes:
            if episode.group_id != self.group_id:
                raise ValueError(
                    f"episode {episode.episode_id} belongs to group {episode.group_id}, not {self.group_id}"
                )

    @property
    def prompt_id(self) -> str:
        return self.prompt.prompt_id

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(t for e in self.episodes for t in e.trajectories)

    @property
    def oldest_version(self) -> int | None:
        """Version of the group's oldest token: what its staleness is measured from."""
        versions = [v for e in self.episodes if (v := e.oldest_version) is not None]
        return min(versions) if versions else None

    def rewards(self, key: str | None = None) -> list[float]:
        """One scalar an episode, in episode order. Raises `ValueError` for a missing or non-finite one."""
        return [e.trajectories[0].scalar_reward(key) for e in self.episodes if e.trajectories]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """`batch_groups` groups that one train step consumes, in issue order, at one policy version."""

    groups: tuple[Group, ...]
    policy_version: int
    step: int

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(t for g in self.groups for t in g.trajectories)

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return tuple(e for g in self.groups for e in g.episodes)

    def staleness(self) -> list[int]:
        """Per group with sampled tokens: `policy_version` minus the version of its oldest token."""
        return [self.policy_version - v for g in self.groups if (v := g.oldest_version) is not None]
