"""A running episode of the simulator, and the episode that the scheduler is told of when it ends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miles_core.data.group import Episode
from miles_core.data.trajectory import Status, Trajectory
from miles_core.rollout.policy import EpisodeStart
from miles_core.simulation.engine import Request
from miles_core.simulation.workload import Plan

__all__ = ["SimulatedEpisode", "Spans"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans(Trajectory):
    """A trajectory with one row for each run of tokens of one version, `lengths` tokens long (int64), so that a million
    episodes of thousands of tokens fit. Right by construction, and therefore not checked."""

    lengths: NDArray[np.int64]

    def __post_init__(self) -> None: ...


class SimulatedEpisode:
    """What it will do (`plan`), how far it is (`turn`, `left` tokens of it), and what was sampled by which version.

    Of its `context`, `known` tokens were in the engine's cache, under the weights of version `cached_since`."""

    __slots__ = (
        "cached_since",
        "context",
        "deadline",
        "engine",
        "known",
        "left",
        "lengths",
        "over",
        "parked_at",
        "plan",
        "prefilled",
        "request",
        "start",
        "turn",
        "versions",
    )

    def __init__(self, start: EpisodeStart, plan: Plan, *, engine: int, deadline: float) -> None:
        self.start = start
        self.plan = plan
        self.engine = engine
        self.deadline = deadline
        self.turn = 0
        self.left = plan.tokens[0]
        self.context = plan.prompt
        self.prefilled = 0.0
        self.known = 0
        self.cached_since = 0
        self.request: Request | None = None
        self.parked_at: float | None = None
        self.over = False
        self.versions: list[int] = []
        self.lengths: list[int] = []

    def add(self, spans: Sequence[tuple[int, int]]) -> None:
        """Tokens that the present turn sampled, as (version, tokens)."""
        for version, tokens in spans:
            self.left -= tokens
            self.context += tokens
            if self.versions and self.versions[-1] == version:
                self.lengths[-1] += tokens
            else:
                self.versions.append(version)
                self.lengths.append(tokens)

    @property
    def tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(self.lengths)

    def ended(self, status: Status) -> Episode:
        """The episode as the scheduler gets it."""
        start = self.start
        trajectories: tuple[Trajectory, ...] = ()
        if self.versions:
            token_ids, loss_mask, logprobs = _columns(len(self.versions))
            trajectories = (
                Spans(
                    token_ids=token_ids,
                    loss_mask=loss_mask,
                    logprobs=logprobs,
                    versions=np.array(self.versions, np.int32),
                    lengths=np.array(self.lengths, np.int64),
                    prompt_id=start.prompt.prompt_id,
                    group_id=start.group_id,
                    episode_id=start.episode_id,
                    trajectory_id=f"{start.episode_id}.0",
                    status=status,
                ),
            )
        return Episode(
            episode_id=start.episode_id,
            prompt_id=start.prompt.prompt_id,
            group_id=start.group_id,
            status=status,
            trajectories=trajectories,
            reward=1.0 if status is Status.COMPLETED else None,
            error="" if status is Status.COMPLETED else f"simulated: {status.value}",
            metrics={"prefilled": self.prefilled},
        )


@functools.cache
def _columns(rows: int) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]:
    """What all trajectories of so many rows have in common; read-only."""
    columns = (np.zeros(rows, np.int32), np.ones(rows, np.bool_), np.zeros(rows, np.float32))
    for column in columns:
        column.setflags(write=False)
    return columns
