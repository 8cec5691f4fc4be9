"""The scheduler: decides which episodes start, what happens to finished groups, and what a batch is.

It does no input or output but the ledger's, so that tests and the simulator drive the very same class on a virtual
clock. The producer (`miles_core.rollout.producer`) carries out what it decides. Synchronous and asynchronous runs
differ in two decisions only: how many groups may be open (`_room`), and whether a batch may be taken while
others run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.seeds import derive_seed
from miles_core.data.trajectory import Status
from miles_core.errors import MilesError
from miles_core.rollout.ledger import Ledger

__all__ = ["EpisodeStart", "SchedulePolicy", "Scheduler"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """The numbers that `[schedule]` gives; see `ScheduleSection` for what each means."""

    mode: Literal["sync", "async"]
    batch_groups: int
    group_size: int
    retries: int
    max_drops: int
    max_running: int = 0
    slot: Literal["episode", "group"] = "episode"
    capacity: int = 2
    max_staleness: int = 2
    stale: Literal["drop", "retry"] = "drop"
    order: Literal["fifo", "freshest", "oldest_issue"] = "fifo"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStart:
    """An episode that may start now. `priority` is its place in submission order."""

    group_id: str
    episode_id: str
    prompt: Prompt
    seed: int
    priority: int


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
    """A group whose episodes run: those not started yet, and those that ended, by index."""

    position: int
    attempt: int
    prompt: Prompt
    unstarted: list[int]
    ended: dict[int, Episode]


class Scheduler:
    """Groups from issue to batch. `prompt_at(position)` is the data order; `seed` the run's."""

    def __init__(
        self, policy: SchedulePolicy, ledger: Ledger, prompt_at: Callable[[int], Prompt], *, seed: int
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._prompt_at = prompt_at
        self._seed = seed
        self._pending: list[tuple[int, str, int]] = [(e.position, e.group_id, e.attempt) for e in ledger.open()]
        self._running: dict[str, _Running] = {}
        self._scoring: dict[str, _Running] = {}
        self._buffer: list[Group] = []
        self._position_of: dict[str, int] = {}
        self._collecting = policy.mode == "async"
        self._step = 0
        self._last_reason = ""
        self.dropped: Counter[str] = Counter()
        """Drops of the current step by reason."""

    # What the producer asks.

    @property
    def running_episodes(self) -> int:
        return sum(self._policy.group_size - len(r.unstarted) - len(r.ended) for r in self._running.values())

    @property
    def depth(self) -> int:
        """Finished groups in the buffer."""
        return len(self._buffer)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing is being scored."""
        return not self._running and not self._scoring

    def begin(self, step: int) -> None:
        """The trainer wants the batch of `step` (0-based)."""
        self._step = step
        self._collecting = True
        self.dropped.clear()

    def starts(self) -> list[EpisodeStart]:
        """The episodes that may start now, in submission order; they count as running from here on."""
        if not self._collecting:
            return []
        for _ in range(self._room()):
            self._open_group()
        started: list[EpisodeStart] = []
        limit = self._episode_slots()
        for group_id, running in self._running.items():
            while running.unstarted and len(started) < limit:
                started.append(self._start(group_id, running, running.unstarted.pop(0)))
        return started

    def _room(self) -> int:
        """How many more groups may be opened."""
        policy = self._policy
        outstanding = len(self._running) + len(self._scoring) + len(self._buffer)
        if policy.mode == "sync":
            return policy.batch_groups - outstanding if self.idle else 0  # in waves: see the page on determinism
        if policy.slot == "group":
            busy = len(self._running) * policy.group_size
        else:
            busy = sum(policy.group_size - len(r.ended) for r in self._running.values())
        by_slots = (policy.max_running - busy + policy.group_size - 1) // policy.group_size
        return max(0, min(by_slots, policy.capacity * policy.batch_groups - outstanding))

    def _episode_slots(self) -> int:
        if self._policy.mode == "sync":
            return self._policy.batch_groups * self._policy.group_size
        return max(0, self._policy.max_running - self.running_episodes)

    def _open_group(self) -> None:
        if self._pending:
            position, group_id, attempt = self._pending.pop(0)
            prompt = self._prompt_at(position)
        else:
            position, attempt = self._ledger.next_position(), 0
            group_id = f"g{position:07d}"
            prompt = self._prompt_at(position)
            self._ledger.issue(group_id, position=position, prompt_id=prompt.prompt_id)
        self._ledger.move([group_id], "running", step=self._step)
        self._position_of[group_id] = position
        self._running[group_id] = _Running(
            position=position,
            attempt=attempt,
            prompt=prompt,
            unstarted=list(range(self._policy.group_size)),
            ended={},
        )

    def _start(self, group_id: str, running: _Running, index: int) -> EpisodeStart:
        return EpisodeStart(
            group_id=group_id,
            episode_id=f"{group_id}.{running.attempt}/{index}",
            prompt=running.prompt,
            seed=derive_seed(self._seed, "episode", running.position, running.attempt, index),
            priority=running.position * self._policy.group_size + index,
        )

    # What the producer reports.

    def episode_ended(self, episode: Episode) -> Group | None:
        """An episode ended, however. Returns the whole group when it was the last of it, to be scored."""
        running = self._running[episode.group_id]
        index = int(episode.episode_id.rpartition("/")[2])
        assert index not in running.ended, f"episode {episode.episode_id} ended twice"
        running.ended[index] = episode
        if len(running.ended) < self._policy.group_size:
            return None
        del self._running[episode.group_id]
        self._scoring[episode.group_id] = running
        return Group(
            group_id=episode.group_id,
            prompt=running.prompt,
            episodes=tuple(running.ended[i] for i in range(self._policy.group_size)),
        )

    def group_scored(self, group: Group, drop_reason: str | None) -> str | None:
        """A complete group with its rewards. `drop_reason` is what a filter said. Returns why the group was dropped,
        None when it was kept or is tried again. Raises `MilesError` when one step has dropped too many."""
        running = self._scoring.pop(group.group_id)
        broken = [e for e in group.episodes if e.status in (Status.FAILED, Status.ABORTED)]
        if broken:
            reason = f"{broken[0].status.value}: {broken[0].error or 'aborted by the engine'}"
            if running.attempt < self._policy.retries:
                self._ledger.move([group.group_id], "pending", step=self._step, reason=reason)
                self._pending.insert(0, (running.position, group.group_id, running.attempt + 1))
                self._pending.sort()
                return None
            drop_reason = broken[0].status.value
            self._last_reason = reason
        if drop_reason is not None:
            self._ledger.move([group.group_id], "dropped", step=self._step, reason=drop_reason)
            self._count_drop(drop_reason)
            return drop_reason
        self._ledger.move([group.group_id], "finished", step=self._step)
        self._buffer.append(group)
        return None

    def _count_drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        limit = self._policy.max_drops or 20 * self._policy.batch_groups
        if self.dropped.total() >= limit:
            counts = ", ".join(f"{r} {n}" for r, n in self.dropped.most_common())
            last = f"; the last failure: {self._last_reason}" if self._last_reason else ""
            raise MilesError(
                f"step {self._step} dropped {self.dropped.total()} groups ({counts}), the limit of [schedule] max_drops"
                f"{last}. Failed groups: fix what failed and `miles resume`. Filtered groups: the task is too easy or "
                f"too hard for the policy at this temperature; change the data or the filter."
            )

    # What the trainer takes.

    def take(self, policy_version: int) -> Sequence[Group] | None:
        """The groups of the next batch, now `batched`, or None while there are not enough. In issue order."""
        if self._policy.mode == "async":
            self._answer_stale(policy_version)
        if len(self._buffer) < self._policy.batch_groups:
            return None
        order = self._policy.order if self._policy.mode == "async" else "oldest_issue"
        if order == "oldest_issue":
            self._buffer.sort(key=lambda g: self._position_of[g.group_id])
        elif order == "freshest":
            self._buffer.sort(key=lambda g: -(g.oldest_version or 0))
        count = self._policy.batch_groups
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        taken.sort(key=lambda g: self._position_of[g.group_id])
        self._ledger.move([g.group_id for g in taken], "batched", step=self._step, version=policy_version)
        for group in taken:
            del self._position_of[group.group_id]
        if self._policy.mode == "sync":
            self._collecting = False
        return taken

    def _answer_stale(self, policy_version: int) -> None:
        """Groups whose oldest token is over the bound leave the buffer, by policy."""
        fresh: list[Group] = []
        for group in self._buffer:
            oldest = group.oldest_version
            if oldest is None or policy_version - oldest <= self._policy.max_staleness:
                fresh.append(group)
            elif self._policy.stale == "retry":
                self._ledger.move([group.group_id], "pending", step=self._step, reason="stale")
                attempt = int(group.episodes[0].episode_id.partition(".")[2].partition("/")[0]) + 1
                self._pending.append((self._position_of[group.group_id], group.group_id, attempt))
                self._pending.sort()
            else:
                self._ledger.move([group.group_id], "dropped", step=self._step, reason="stale")
                self._count_drop("stale")
        self._buffer = fresh
