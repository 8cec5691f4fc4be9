"""From turns to a trajectory: prompt ids, generations, injected ids, appended in the order in which they happened.

Nothing is decoded, re-encoded or filled in: a column comes from the engine's answer or the recorder refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from miles_core.data.trajectory import NOT_SAMPLED, Status, Trajectory, Turn
from miles_core.errors import EnvironmentFailure

if TYPE_CHECKING:
    from miles_core.contracts.engines import Generation
    from miles_core.contracts.environments import EpisodeTask

__all__ = ["TrajectoryRecorder", "status_of"]


def status_of(finish_reason: str) -> Status:
    """Status of an episode whose last generation ended by `finish_reason`. Raises `EnvironmentFailure` for others."""
    match finish_reason:
        case "stop":
            return Status.COMPLETED
        case "length":
            return Status.TRUNCATED
        case "abort":
            return Status.ABORTED
    raise EnvironmentFailure(f"the engine ended a generation by {finish_reason!r}; known: stop, length, abort")


class TrajectoryRecorder:
    """One linear trajectory of an episode. `index` numbers the trajectories of a branching episode."""

    def __init__(self, task: EpisodeTask, *, index: int = 0) -> None:
        self._task = task
        self._index = index
        self._ids = np.zeros(0, np.int32)
        self._logprobs = np.zeros(0, np.float32)
        self._versions = np.zeros(0, np.int32)
        self._turns: list[Turn] = []
        self._routes: NDArray[np.int32] | None = None

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids so far, read-only: the input of the next generation."""
        return self._ids

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def room(self) -> int | None:
        """Tokens that still fit under `task.max_tokens`; None without a limit."""
        return None if self._task.max_tokens == 0 else max(0, self._task.max_tokens - len(self._ids))

    def append_prompt(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Append tokens that the model did not sample: mask 0, no log-prob, no version."""
        count = len(ids)
        self._append(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.full(count, NOT_SAMPLED, np.int32))

    def append_generation(self, generation: Generation) -> None:
        """Append what the engine sampled behind exactly `ids`.

        Raises `EnvironmentFailure` when its columns disagree, or when a routed-experts row is missing.
        """
        count = len(generation.token_ids)
        if not len(generation.logprobs) == len(generation.versions) == count:
            raise EnvironmentFailure(
                f"episode {self._task.episode_id}: engine {generation.engine} answered {count} ids, "
                f"{len(generation.logprobs)} log-probs and {len(generation.versions)} versions"
            )
        if count and generation.prompt_tokens != len(self._ids):
            raise EnvironmentFailure(
                f"episode {self._task.episode_id}: engine {generation.engine} counted {generation.prompt_tokens} "
                f"prompt tokens where {len(self._ids)} were sent"
            )
        start = len(self._ids)
        self._append(generation.token_ids, generation.logprobs, generation.versions)
        self._append_routes(generation)
        self._turns.append(
            Turn(
                start=start,
                stop=start + count,
                finish_reason=generation.finish_reason,
                engine=generation.engine,
                cached_tokens=generation.cached_tokens,
                started=generation.started,
                finished=generation.finished,
                request_id=generation.request_id,
            )
        )

    def join(self, drop: int, add: Sequence[int]) -> None:
        """Apply a family's junction to the last turn: forget its last `drop` sampled ids, append `add` unsampled."""
        if drop:
            self._cut(len(self._ids) - drop)
        self.append_prompt(add)

    def build(self, status: Status) -> Trajectory:
        """The trajectory, cut behind the last sampled token, and at `task.max_tokens`.

        Sampled tokens lost to `max_tokens` make a completed episode `truncated`. What was injected behind the last
        sampled token taught nothing and is left out; a trajectory without sampled tokens keeps its prompt.
        """
        limit = self._task.max_tokens or len(self._ids)
        sampled = (self._versions != NOT_SAMPLED).nonzero()[0]
        fitting = sampled if len(self._ids) <= limit else sampled[sampled < limit]
        if len(fitting) < len(sampled):
            self._cut(limit, finish_reason="length")
            status = Status.TRUNCATED if status is Status.COMPLETED else status
        if len(fitting) and fitting[-1] + 1 < len(self._ids):
            self._cut(int(fitting[-1]) + 1)
        return Trajectory(
            token_ids=self._ids,
            loss_mask=self._versions != NOT_SAMPLED,
            logprobs=self._logprobs,
            versions=self._versions,
            prompt_id=self._task.prompt.prompt_id,
            group_id=self._task.group_id,
            episode_id=self._task.episode_id,
            trajectory_id=f"{self._task.episode_id}.{self._index}",
            turns=tuple(self._turns),
            routed_experts=self._routes,
            status=status,
        )

    def _append(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], versions: NDArray[np.int32]) -> None:
        self._ids = np.concatenate((self._ids, ids))
        self._ids.flags.writeable = False
        self._logprobs = np.concatenate((self._logprobs, logprobs))
        self._versions = np.concatenate((self._versions, versions))

    def _cut(self, length: int, *, finish_reason: str | None = None) -> None:
        """Forget everything from token `length` on; a turn that loses tokens is said to have ended so."""
        self._ids, self._logprobs, self._versions = self._ids[:length], self._logprobs[:length], self._versions[:length]
        kept = [turn for turn in self._turns if turn.start < length or turn.stop <= length]
        self._turns = [
            turn
            if turn.stop <= length
            else dataclasses.replace(turn, stop=length, finish_reason=finish_reason or turn.finish_reason)
            for turn in kept
        ]
        if self._routes is not None:
            self._routes = self._routes[: max(length - 1, 0)]

    def _append_routes(self, generation: Generation) -> None:
        """Stitch the rows of one generation: row i routed position i, and the last position has routed nothing yet.

        Rows that an earlier turn recorded stay: they are the routes under which those tokens were sampled. An empty
        generation (an abort during prefill) has no rows to give.
        """
        if not len(generation.token_ids):
            return
        routes = generation.routed_experts
        if (routes is None) != (self._routes is None) and (routes is None or self._sampled_before()):
            raise EnvironmentFailure(f"{self._place()}: routed experts came with some turns and not with others")
        if routes is None:
            return
        covered = 0 if self._routes is None else len(self._routes)
        needed = len(self._ids) - 1
        first, last = generation.routed_start, generation.routed_start + len(routes)
        if first > covered or last != needed:
            raise EnvironmentFailure(
                f"{self._place()}: routed experts cover positions {first} up to {last}, but rows {covered} up to "
                f"{needed} are needed; a missing row is never padded"
            )
        new = routes[covered - first :]
        self._routes = new if self._routes is None else np.concatenate([self._routes, new])

    def _sampled_before(self) -> bool:
        """Whether an earlier turn sampled anything."""
        return any(turn.stop > turn.start for turn in self._turns)

    def _place(self) -> str:
        return f"episode {self._task.episode_id}, turn {len(self._turns)}"
