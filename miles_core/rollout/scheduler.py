"""The scheduler: decides which episodes start, what happens to finished groups, and what a batch is.

It does no input or output but the ledger's, and reads no clock but the one it is given, so that tests and the simulator
drive the very same class on a virtual clock. The producer (`miles_core.rollout.producer`) carries out what it decides.
Synchronous and asynchronous runs differ in two decisions only: how many groups may be open (`_room`), and what becomes
of those that a batch leaves behind (`take`). Every call costs O(1) amortised, whatever runs (a heap of pending groups
and a buffer to sort apart).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.seeds import derive_seed
from miles_core.data.trajectory import Status
from miles_core.errors import MilesError
from miles_core.rollout.adaptive import AdaptiveController
from miles_core.rollout.buffer import Buffer, Finished, OpenGroup
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.pace import Pace
from miles_core.rollout.policy import EpisodeStart, SchedulePolicy
from miles_core.rollout.staleness import fresh_episodes, reweighted, span_of

__all__ = ["Scheduler"]


class Scheduler:
    """Groups from issue to batch.

    `prompt_at(position)` is the data order, `seed` the run's, `clock()` seconds from anywhere. The ledger is that of a
    run that starts, or was rewound: its open groups are `pending`.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        ledger: Ledger,
        prompt_at: Callable[[int], Prompt],
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._prompt_at = prompt_at
        self._seed = seed
        self._pending = [OpenGroup(position=e.position, group_id=e.group_id, attempt=e.attempt) for e in ledger.open()]
        heapq.heapify(self._pending)
        self._next_position = ledger.next_position()
        self._running: dict[str, OpenGroup] = {}
        self._scoring: dict[str, OpenGroup] = {}
        self._unstarted: deque[tuple[OpenGroup, int]] = deque()
        self._buffer = Buffer(policy.order if policy.mode == "async" else "fifo")
        self._unended = 0
        self._collecting = policy.mode == "async"
        self._step = 0
        self._version = 0
        self._last_reason = ""
        self._withdrawn: list[str] = []
        self._dropped: list[tuple[str, str]] = []
        self._pace = Pace(clock)
        self._controller: AdaptiveController | None = None
        self._max_running, self._open_limit = policy.max_running, policy.capacity * policy.batch_groups
        if policy.adaptive:
            self._controller = AdaptiveController(
                batch_groups=policy.batch_groups,
                group_size=policy.group_size,
                target_staleness=policy.target_staleness,
                max_running=policy.max_running,
                capacity=policy.capacity,
            )
            self.resize(capacity=self._controller.start.capacity)
        self.dropped: Counter[str] = Counter()
        """Drops of the current step by reason."""
        self.returned: Counter[str] = Counter()
        """Groups that went back to `pending` in the current step, by `failed`, `retry`, `resample` or `surplus`."""
        self.metrics: dict[str, float] = {}
        """What the last batch waited for, and what ran meanwhile; see the page on scheduling."""

    # What the producer asks.

    @property
    def running_episodes(self) -> int:
        """Episodes that were started and have not ended."""
        return self._pace.running

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
        self.returned.clear()
        self._pace.wanted()

    def resize(self, *, max_running: int | None = None, capacity: float | None = None) -> None:
        """Let other numbers hold from now on. What runs goes on: fewer start until the new bounds are met."""
        if max_running is not None:
            self._max_running = max_running
        if capacity is not None:
            self._open_limit = max(self._policy.batch_groups, round(capacity * self._policy.batch_groups))

    def starts(self) -> list[EpisodeStart]:
        """The episodes that may start now, in submission order; they count as running from here on."""
        if not self._collecting:
            return []
        room = self._room()
        if room > 0:
            with self._ledger.transaction():
                while room > 0:
                    for _ in range(room):
                        self._open_group()
                    room = self._room()
        slots = len(self._unstarted) if self._policy.mode == "sync" else self._max_running - self.running_episodes
        started: list[EpisodeStart] = []
        while self._unstarted and len(started) < slots:
            opened, index = self._unstarted.popleft()
            if self._running.get(opened.group_id) is opened:
                opened.unstarted -= 1
                started.append(self._start(opened, index))
        self._pace.run(len(started))
        return started

    def withdrawn(self) -> list[str]:
        """Groups that nobody waits for any more, each once: their episodes are to be cancelled. What one of them still
        reports is ignored."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def drops(self) -> list[tuple[str, str]]:
        """(group, reason) of every drop since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _room(self) -> int:
        """How many more groups may be opened."""
        policy = self._policy
        outstanding = len(self._running) + len(self._scoring) + len(self._buffer)
        if policy.mode == "sync":
            if policy.waves and not self.idle:  # see the page on determinism
                return 0
            return policy.batch_groups + policy.over_sample - outstanding
        busy = self._unended if policy.slot == "episode" else len(self._running) * policy.group_size
        by_slots = (self._max_running - busy + policy.group_size - 1) // policy.group_size
        return min(by_slots, self._open_limit - outstanding)

    def _open_group(self) -> None:
        if self._pending:
            opened = heapq.heappop(self._pending)
            if opened.prompt is None:
                opened.prompt = self._prompt_at(opened.position)
        else:
            position = self._next_position
            prompt = self._prompt_at(position)
            opened = OpenGroup(position=position, group_id=f"g{position:07d}", prompt=prompt)
            self._ledger.issue(opened.group_id, position=position, prompt_id=prompt.prompt_id)
            self._next_position += 1
        self._ledger.move([opened.group_id], "running", step=self._step)
        self._running[opened.group_id] = opened
        missing = [index for index in range(self._policy.group_size) if index not in opened.ended]
        opened.unstarted = len(missing)
        self._unended += len(missing)
        self._unstarted += [(opened, index) for index in missing]

    def _start(self, opened: OpenGroup, index: int) -> EpisodeStart:
        assert opened.prompt is not None
        return EpisodeStart(
            group_id=opened.group_id,
            episode_id=f"{opened.group_id}.{opened.attempt}/{index}",
            prompt=opened.prompt,
            seed=derive_seed(self._seed, "episode", opened.position, opened.attempt, index),
            priority=opened.position * self._policy.group_size + index,
        )

    # What the producer reports.

    def episode_ended(self, episode: Episode) -> Group | None:
        """An episode ended, however. Returns the whole group when it was the last of it, to be scored."""
        opened = self._running.get(episode.group_id)
        attempt, index = _attempt_and_index(episode.episode_id)
        if opened is None or attempt != opened.attempt:
            return None  # withdrawn meanwhile
        assert opened.prompt is not None
        assert index not in opened.ended, f"episode {episode.episode_id} ended twice"
        opened.ended[index] = episode
        self._unended -= 1
        self._pace.end()
        if len(opened.ended) < self._policy.group_size:
            return None
        del self._running[episode.group_id]
        self._scoring[episode.group_id] = opened
        return Group(
            group_id=episode.group_id,
            prompt=opened.prompt,
            episodes=tuple(opened.ended[i] for i in range(self._policy.group_size)),
        )

    def group_scored(self, group: Group, drop_reason: str | None) -> str | None:
        """A complete group with its rewards. `drop_reason` is what a filter said. Returns why the group was dropped,
        None when it was kept or is tried again. Raises `MilesError` when one step has dropped too many."""
        opened = self._scoring.get(group.group_id)
        if opened is None or any(opened.ended[i].episode_id != e.episode_id for i, e in enumerate(group.episodes)):
            return None  # withdrawn meanwhile
        del self._scoring[group.group_id]
        broken = next((e for e in group.episodes if e.status in (Status.FAILED, Status.ABORTED)), None)
        if broken is not None:
            reason = f"{broken.status.value}: {broken.error or 'aborted by the engine'}"
            if opened.failures < self._policy.retries:
                self._return("failed", [opened.again(failures=1)], reason=reason)
                return None
            drop_reason = broken.status.value
            self._last_reason = reason
        if drop_reason is not None:
            self._drop(group.group_id, drop_reason)
            return drop_reason
        self._ledger.move([group.group_id], "finished", step=self._step)
        span = span_of(group)
        oldest, newest = (None, None) if span is None else span
        finished = Finished(group=group, open=opened, oldest=oldest, newest=newest)
        if self._too_old(finished):
            return self._answer(finished)
        self._buffer.add(finished)
        return None

    def _return(self, why: str, groups: Sequence[OpenGroup], *, reason: str) -> None:
        """These groups are pending again."""
        self._ledger.move([g.group_id for g in groups], "pending", step=self._step, reason=reason)
        self.returned[why] += len(groups)
        for opened in groups:
            heapq.heappush(self._pending, opened)

    def _drop(self, group_id: str, reason: str) -> None:
        self._ledger.move([group_id], "dropped", step=self._step, reason=reason)
        self._dropped.append((group_id, reason))
        self.dropped[reason] += 1
        limit = self._policy.max_drops or 20 * self._policy.batch_groups
        if self.dropped.total() >= limit:
            counts = ", ".join(f"{r} {n}" for r, n in self.dropped.most_common())
            last = f"; the last failure: {self._last_reason}" if self._last_reason else ""
            raise MilesError(
                f"step {self._step} dropped {self.dropped.total()} groups ({counts}), the limit of [schedule] max_drops"
                f"{last}. Failed groups: fix what failed and `miles resume`. Filtered groups: the task is too easy or "
                f"too hard for the policy at this temperature; change the data or the filter. Stale groups: train on "
                f"more groups a step, or raise [schedule] max_staleness."
            )

    # What the trainer takes.

    def take(self, policy_version: int) -> Sequence[Group] | None:
        """The groups of the next batch, now `batched`, or None while there are not enough. In issue order. Raises
        `MilesError` for a token of a version that the trainer has not reached."""
        policy = self._policy
        if policy_version != self._version:
            self._version = policy_version
            for finished in self._buffer.remove_if(self._too_old):
                self._answer(finished)
        if len(self._buffer) < policy.batch_groups:
            return None
        with self._ledger.transaction():
            taken = self._buffer.take(policy.batch_groups)
            self._ledger.move([f.open.group_id for f in taken], "batched", step=self._step, version=policy_version)
            if policy.mode == "sync":
                self._collecting = False
                if not policy.partial:
                    self._withdraw()
        self._measure(taken)
        return [self._trained(finished) for finished in taken]

    def _trained(self, finished: Finished) -> Group:
        """The group as it trains."""
        if finished.newest is not None and finished.newest > self._version:
            raise MilesError(
                f"group {finished.open.group_id} holds tokens of version {finished.newest}, and the trainer is at "
                f"{self._version}: versions went back. A resumed run goes on counting; a user's engine must serve the "
                f"version of the checkpoint that the run was resumed from"
            )
        allowed = self._version - self._policy.max_staleness
        if self._policy.stale != "reweight" or finished.oldest is None or finished.oldest >= allowed:
            return finished.group
        return reweighted(finished.group, oldest_allowed=allowed, decay=self._policy.stale_decay)

    def _too_old(self, finished: Finished) -> bool:
        """Whether the policy's answer to stale groups is due. A reweighted group may be taken as long as one of its
        tokens weighs something."""
        if not self._policy.ages or finished.oldest is None or finished.newest is None:
            return False
        if self._policy.stale == "reweight":
            return self._policy.stale_decay == 0 and self._version - finished.newest > self._policy.max_staleness
        return self._version - finished.oldest > self._policy.max_staleness

    def _answer(self, finished: Finished) -> str | None:
        """A group over the bound leaves, by policy. Returns why it was dropped, if it was."""
        opened, answer = finished.open, self._policy.stale
        if answer in ("retry", "resample") and opened.stale < self._policy.retries:
            kept: dict[int, Episode] = {}
            if answer == "resample":
                allowed = self._version - self._policy.max_staleness
                kept = fresh_episodes(finished.group, oldest_allowed=allowed)
            self._return(answer, [opened.again(stale=1, kept=kept)], reason="stale")
            return None
        self._drop(opened.group_id, "stale")
        return "stale"

    def _withdraw(self) -> None:
        """What a synchronous step does not need is pending again, and taken first by the next."""
        unneeded = [*self._running.values(), *self._scoring.values()]
        self._withdrawn += [opened.group_id for opened in unneeded]
        unneeded += [finished.open for finished in self._buffer.clear()]
        if unneeded:
            self._return("surplus", [opened.again() for opened in unneeded], reason="surplus")
        self._running.clear()
        self._scoring.clear()
        self._unstarted.clear()
        self._unended = 0
        self._pace.stop()

    def _measure(self, taken: Sequence[Finished]) -> None:
        ages = [self._version - f.oldest for f in taken if f.oldest is not None]
        staleness = sum(ages) / len(ages) if ages else 0.0
        measured = self._pace.taken(episodes=len(taken) * self._policy.group_size, staleness=staleness)
        if self._controller is not None and measured is not None:
            settings = self._controller.update(measured)
            self.resize(max_running=settings.max_running, capacity=settings.capacity)
        self.metrics = {**self._pace.metrics, "buffer_depth": float(len(self._buffer))}
        if self._policy.mode == "async":
            self.metrics["max_running"] = float(self._max_running)
            self.metrics["capacity"] = self._open_limit / self._policy.batch_groups


def _attempt_and_index(episode_id: str) -> tuple[int, int]:
    """`g0000003.1/7` is episode 7 of attempt 1."""
    _, _, rest = episode_id.rpartition(".")
    attempt, _, index = rest.partition("/")
    return int(attempt), int(index)
