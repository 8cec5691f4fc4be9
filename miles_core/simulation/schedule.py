"""The simulator: the product's `Scheduler`, carried out by events on a virtual clock instead of by tasks.

It stands where `miles_core.rollout.producer.Producer` and the run loop stand, and calls the scheduler in their order:
an episode's end is reported, what may start starts, the trainer looks for its batch. Nothing of the scheduler, the
buffer, the ledger, the answers to stale groups or the adaptive controller is written a second time.
"""

from __future__ import annotations

import gc
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.data.group import Group, Prompt
from miles_core.data.seeds import derive_seed
from miles_core.data.trajectory import Status
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.policy import EpisodeStart
from miles_core.rollout.scheduler import Scheduler
from miles_core.runs.rollouts import policy_of
from miles_core.simulation.accounts import Accounts
from miles_core.simulation.distributions import Distribution
from miles_core.simulation.engine import Request
from miles_core.simulation.episodes import SimulatedEpisode
from miles_core.simulation.fleet import Fleet
from miles_core.simulation.outcome import Outcome
from miles_core.simulation.scenario import Scenario
from miles_core.simulation.workload import DrawnWorkload, Workload

__all__ = ["Simulation", "simulate"]

_BLOCK = 256
"""Train and publish times that are drawn at once."""


def simulate(scenario: Scenario, workload: Workload | None = None) -> Outcome:
    """Run a scenario to its last step; `workload` replaces what its `[episodes]` draw. Raises `MilesError` as a run
    would: for too many drops in one step, for a ledger that does not add up. Equal scenarios give equal outcomes."""
    return Simulation(scenario, workload).run()


class Simulation:
    """One scenario on one clock."""

    def __init__(self, scenario: Scenario, workload: Workload | None = None) -> None:
        section, seed = scenario.schedule, scenario.simulation.seed
        self._policy = policy_of(section)
        self._interrupts = section.pause == "abort" and not section.partial
        self._recomputes = section.pause != "in_place"
        self._parks = self._policy.mode == "sync" and self._policy.partial
        self._timeout = section.episode_timeout
        self._cached = scenario.engines.cached
        self._steps = scenario.simulation.steps
        self._workload = workload or DrawnWorkload(scenario.episodes, group_size=section.group_size, seed=seed)
        self._train = _drawn(scenario.trainer.train_seconds, seed, "train")
        self._publish = _drawn(scenario.trainer.publish_seconds, seed, "publish")
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._events_made = 0
        self._ledger = Ledger(Path(":memory:"))
        self._scheduler = Scheduler(self._policy, self._ledger, _prompt_at, seed=seed, clock=lambda: self._now)
        self._fleet = Fleet(scenario.engines, lambda time, engine: self._at(time, self._engine_due, engine))
        self._accounts = Accounts(self._fleet, warmup=scenario.simulation.warmup)
        self._running: defaultdict[str, dict[str, SimulatedEpisode]] = defaultdict(dict)
        self._deadlines: deque[tuple[float, SimulatedEpisode]] = deque()
        self._parked: list[SimulatedEpisode] = []
        self._version = 0
        self._waiting = False
        self._in_training: list[Group] = []

    def run(self) -> Outcome:
        """Every step, and what they came to."""
        collects = gc.isenabled()
        gc.disable()  # nothing here is cyclic but requests in flight, and what runs is looked through again and again
        try:
            self._want_batch()
            while self._version < self._steps:
                self._next_event()
            law = self._ledger.check()
            for episode in self._all_running():
                self._interrupt(episode)
                self._accounts.left_open(episode)
            return self._accounts.outcome(self._now, law)
        finally:
            if collects:
                gc.enable()
            self._ledger.close()

    # The clock.

    def _at(self, time: float, call: Callable[[Any], None], what: Any) -> None:
        self._events_made += 1
        heapq.heappush(self._events, (time, self._events_made, call, what))

    def _next_event(self) -> None:
        """Deadlines come in the order of the starts: they need no place among the events."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1].over:
            deadlines.popleft()
        if deadlines and (not self._events or deadlines[0][0] < self._events[0][0]):
            self._now, episode = deadlines.popleft()
            self._deadline(episode)
            return
        assert self._events, "the trainer waits for a batch, and nothing is under way"
        self._now, _, call, what = heapq.heappop(self._events)
        call(what)

    # Episodes.

    def _start_episodes(self) -> None:
        for start in self._scheduler.starts():
            self._start(start)

    def _start(self, start: EpisodeStart) -> None:
        deadline = self._now + self._timeout
        episode = SimulatedEpisode(start, self._workload.plan(start), engine=self._fleet.assign(), deadline=deadline)
        self._running[start.group_id][start.episode_id] = episode
        self._accounts.started(self._now)
        self._deadlines.append((deadline, episode))
        self._generate(episode)

    def _generate(self, episode: SimulatedEpisode) -> None:
        """Sample what is left of a turn. What stood in a cache before the weights changed is prefilled again."""
        context = episode.context
        fresh = context - episode.known if episode.cached_since == self._cache_age else context
        prefill = fresh + (context - fresh) * (1 - self._cached)
        episode.prefilled += prefill
        episode.request = Request(episode, tokens=episode.left, context=context, prefill=prefill)
        self._fleet.submit(episode.engine, episode.request, self._now)

    @property
    def _cache_age(self) -> int:
        """What is in the caches was computed by this version."""
        return self._version if self._recomputes else 0

    def _engine_due(self, index: int) -> None:
        for request, spans in self._fleet.ended(index, self._now):
            self._turn_ended(request.owner, spans)

    def _turn_ended(self, episode: SimulatedEpisode, spans: list[tuple[int, int]]) -> None:
        episode.request = None
        episode.add(spans)
        episode.known = episode.context
        episode.cached_since = self._cache_age
        plan, turn = episode.plan, episode.turn
        if plan.fails == turn:
            self._end(episode, Status.FAILED)
        elif plan.tool_seconds[turn] > 0:
            self._at(self._now + plan.tool_seconds[turn], self._tool_ended, episode)
        else:
            self._tool_ended(episode)

    def _tool_ended(self, episode: SimulatedEpisode) -> None:
        if episode.over:
            return
        plan = episode.plan
        episode.context += plan.tool_tokens[episode.turn]
        episode.turn += 1
        if episode.turn == len(plan.tokens):
            self._end(episode, Status.COMPLETED)
            return
        episode.left = plan.tokens[episode.turn]
        if self._parks and not self._waiting:
            self._park(episode)
        else:
            self._generate(episode)

    def _deadline(self, episode: SimulatedEpisode) -> None:
        if episode.over or episode.parked_at is not None:
            return
        if episode.deadline > self._now:
            self._at(episode.deadline, self._deadline, episode)
            return
        self._interrupt(episode)
        self._end(episode, Status.FAILED)

    def _interrupt(self, episode: SimulatedEpisode) -> bool:
        """Abort what an engine does for an episode, and keep the tokens. Whether there was something."""
        if episode.request is None:
            return False
        episode.add(self._fleet.cancel(episode.engine, episode.request, self._now))
        episode.request = None
        self._accounts.cut()
        return True

    def _remove(self, episode: SimulatedEpisode) -> None:
        episode.over = True
        self._accounts.removed(self._now)
        self._fleet.release(episode.engine)
        of_group = self._running[episode.start.group_id]
        del of_group[episode.start.episode_id]
        if not of_group:
            del self._running[episode.start.group_id]

    def _end(self, episode: SimulatedEpisode, status: Status) -> None:
        self._remove(episode)
        self._accounts.ended(episode)
        group = self._scheduler.episode_ended(episode.ended(status))
        if group is not None:
            seconds = self._workload.reward_seconds(group.group_id)
            if seconds > 0:
                self._at(self._now + seconds, self._scored, group)
            else:
                self._score(group)
        self._go_on()

    def _scored(self, group: Group) -> None:
        self._score(group)
        self._go_on()

    def _score(self, group: Group) -> None:
        filtered = self._workload.dropped(group.group_id)
        self._scheduler.group_scored(group, "filtered" if filtered else None)
        self._accounts.dropped(self._scheduler.drops())

    def _go_on(self) -> None:
        """What the producer does behind every end: start, and let a waiting trainer look."""
        if not self._policy.waves:
            self._start_episodes()
        if self._waiting:
            self._look()

    # The trainer.

    def _want_batch(self) -> None:
        self._scheduler.begin(self._version)
        self._accounts.wanted(self._now, self._version)
        self._waiting = True
        parked, self._parked = self._parked, []
        for episode in parked:
            self._resume(episode)
        self._look()

    def _look(self) -> None:
        groups = self._scheduler.take(self._version)
        self._accounts.dropped(self._scheduler.drops())
        if groups is not None:
            self._waiting = False
            self._in_training = list(groups)
            self._accounts.took(self._now, groups, self._version, self._scheduler.returned)
            for group_id in self._scheduler.withdrawn():
                self._withdraw(group_id)
            if self._parks:
                for episode in self._all_running():
                    if self._interrupt(episode):
                        self._park(episode)
            seconds = next(self._train)
            self._at(self._now + seconds, self._trained, seconds)
        self._start_episodes()

    def _trained(self, train_seconds: float) -> None:
        self._ledger.move([g.group_id for g in self._in_training], "trained", step=self._version)
        self._in_training = []
        seconds = next(self._publish)
        self._accounts.trained(train_seconds, seconds)
        if seconds > 0:
            self._fleet.pause(seconds, self._now)
        if self._interrupts:
            for episode in self._all_running():
                if self._interrupt(episode):
                    self._end(episode, Status.ABORTED)
        if seconds > 0:
            self._at(self._now + seconds, self._published, None)
        else:
            self._published(None)

    def _published(self, _: None) -> None:
        self._version += 1
        self._fleet.update(self._version, self._now, recompute=self._recomputes)
        if self._version < self._steps:
            self._want_batch()

    # What a synchronous step leaves behind.

    def _withdraw(self, group_id: str) -> None:
        for episode in list(self._running.get(group_id, {}).values()):
            self._interrupt(episode)
            self._remove(episode)
            self._accounts.withdrawn(episode)

    def _park(self, episode: SimulatedEpisode) -> None:
        episode.parked_at = self._now
        self._parked.append(episode)

    def _resume(self, episode: SimulatedEpisode) -> None:
        if episode.over:
            return
        assert episode.parked_at is not None
        episode.deadline += self._now - episode.parked_at
        episode.parked_at = None
        self._at(episode.deadline, self._deadline, episode)
        self._generate(episode)

    def _all_running(self) -> list[SimulatedEpisode]:
        return [episode for episodes in self._running.values() for episode in episodes.values()]


def _prompt_at(position: int) -> Prompt:
    return Prompt(prompt_id=f"p{position}", messages=())


def _drawn(distribution: Distribution, seed: int, name: str) -> Iterator[float]:
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, name)))
    while True:
        yield from distribution.draw(generator, (_BLOCK,)).tolist()
