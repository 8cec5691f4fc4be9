"""The producer: carries out what the scheduler decides, one asyncio task an episode."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import EpisodeTask, GenerateEnvironment
from miles_core.contracts.filters import GroupFilter
from miles_core.data.group import Episode, Group, Prompt
from miles_core.rollout.admission import AdmissionClient, EngineHold
from miles_core.rollout.episodes import run_episode
from miles_core.rollout.policy import EpisodeStart
from miles_core.rollout.scheduler import Scheduler

__all__ = ["Producer", "evaluation_tasks", "run_all"]

Score = Callable[[Group], Awaitable[Group]]


class Producer:
    """Starts episodes, scores groups, filters them, and hands batches to the trainer."""

    def __init__(
        self,
        scheduler: Scheduler,
        environment: GenerateEnvironment[Any],
        hold: EngineHold,
        score: Score,
        filters: Sequence[tuple[str, GroupFilter[Any]]],
        *,
        sampling: Sampling,
        max_tokens: int,
        episode_timeout: float,
        ordered: bool,
        parks: bool,
        reward_key: str | None,
        on_finished: Callable[[Group], None],
        on_dropped: Callable[[str, str], None],
    ) -> None:
        """`ordered`: a step's requests start together, in submission order. `parks`: what a batch leaves running waits
        until the next one is wanted."""
        self.scheduler = scheduler
        self._environment = environment
        self._hold = hold
        self._score = score
        self._filters = filters
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._timeout = episode_timeout
        self._ordered = ordered
        self._parks = parks
        self._reward_key = reward_key
        self._on_finished = on_finished
        self._on_dropped = on_dropped
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._of_group: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._held = 0

    async def batch(self, step: int, policy_version: int) -> Sequence[Group]:
        """The groups of the next batch. Raises what stopped the producer, if something did."""
        self.scheduler.begin(step)
        self._hold.resume()
        while True:
            self._raise_failure()
            taken = self.scheduler.take(policy_version)
            self._tell_drops()
            if taken is not None:
                self._cancel(self.scheduler.withdrawn())
                if self._parks and self.scheduler.running_episodes:
                    await self._hold.park()
                await self.pump()
                return taken
            await self.pump()
            await self._changed.wait()
            self._changed.clear()

    async def pump(self) -> None:
        """Start everything that may start now."""
        if self._held:
            return
        starts = self.scheduler.starts()
        if starts:
            tasks = [self._task(start) for start in starts]
            clients = [AdmissionClient(self._hold, priority=task.priority) for task in tasks]
            launched = await _admitted(self._hold, tasks, clients, self._run_to_end, ordered=self._ordered)
            for task, episode in zip(launched, tasks, strict=True):
                self._tasks[task] = episode.group_id
                self._of_group[episode.group_id].add(task)
                task.add_done_callback(self._done)

    def _cancel(self, group_ids: Sequence[str]) -> None:
        """End the episodes of these groups; their requests are aborted in the engines."""
        for group_id in group_ids:
            for task in self._of_group.get(group_id, ()):
                task.cancel()

    def _tell_drops(self) -> None:
        for group_id, reason in self.scheduler.drops():
            self._on_dropped(group_id, reason)

    def _task(self, start: EpisodeStart) -> EpisodeTask:
        return EpisodeTask(
            prompt=start.prompt,
            group_id=start.group_id,
            episode_id=start.episode_id,
            sampling=self._sampling,
            seed=start.seed,
            priority=start.priority,
            max_tokens=self._max_tokens,
        )

    async def _run_to_end(self, task: EpisodeTask, client: AdmissionClient) -> None:
        episode = await run_episode(self._environment, task, client, timeout=self._timeout)
        group = self.scheduler.episode_ended(episode)
        if group is not None:
            scored = await self._score(group)
            self._on_finished(scored)
            self.scheduler.group_scored(scored, self._filter(scored))
            self._tell_drops()
        self._changed.set()
        if not self._ordered:
            await self.pump()

    def _filter(self, group: Group) -> str | None:
        """The first filter's reason to drop the group. Broken groups are the scheduler's to answer."""
        if any(episode.reward is None for episode in group.episodes):
            return None
        rewards = group.rewards(self._reward_key)
        for name, group_filter in self._filters:
            reason = group_filter.drop_reason(group, rewards)
            if reason is not None:
                return f"{name}: {reason}" if reason != name else name
        return None

    def _done(self, task: asyncio.Task[None]) -> None:
        group_id = self._tasks.pop(task)
        siblings = self._of_group[group_id]
        siblings.discard(task)
        if not siblings:
            del self._of_group[group_id]
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def hold(self) -> None:
        """No new episode starts until `release` (shared evaluation); running ones go on. Calls nest."""
        self._held += 1

    async def release(self) -> None:
        self._held -= 1
        await self.pump()

    async def stop(self) -> None:
        """Cancel every episode and wait until it is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def restart(self, scheduler: Callable[[], Scheduler]) -> None:
        """Forget what runs, and go on with another scheduler, made when nothing runs any more."""
        await self.stop()
        self.scheduler = scheduler()
        self._failure = None


async def _admitted(
    hold: EngineHold,
    tasks: Sequence[EpisodeTask],
    clients: Sequence[AdmissionClient],
    run: Callable[[EpisodeTask, AdmissionClient], Awaitable[Any]],
    *,
    ordered: bool,
) -> list[asyncio.Task[Any]]:
    """Start one asyncio task an episode. When `ordered`, first requests wait until every episode has one (or has ended
    without), and go out together, so that what engines sample is a function of submission order, not of timing.
    """

    async def one(task: EpisodeTask, client: AdmissionClient) -> Any:
        try:
            return await run(task, client)
        finally:
            client.queued.set()

    if not ordered:
        return [asyncio.create_task(one(t, c)) for t, c in zip(tasks, clients, strict=True)]
    with hold.together():
        started = [asyncio.create_task(one(t, c)) for t, c in zip(tasks, clients, strict=True)]
        await asyncio.gather(*(client.queued.wait() for client in clients))
    return started


async def run_all(
    hold: EngineHold,
    environment: GenerateEnvironment[Any],
    tasks: Sequence[EpisodeTask],
    *,
    timeout: float,
    ordered: bool,
) -> list[Episode]:
    """Episodes outside the training schedule (evaluation), all at once, results in task order."""

    async def one(task: EpisodeTask, client: AdmissionClient) -> Episode:
        return await run_episode(environment, task, client, timeout=timeout)

    clients = [AdmissionClient(hold, priority=task.priority, parks=False) for task in tasks]
    started = await _admitted(hold, tasks, clients, one, ordered=ordered)
    return list(await asyncio.gather(*started))


def evaluation_tasks(
    prompts: Sequence[Prompt],
    samples: int,
    sampling: Sampling,
    *,
    name: str,
    seeds: Callable[[str, int], int],
    max_tokens: int,
) -> list[EpisodeTask]:
    """`samples` episodes of each prompt, in prompt order."""
    return [
        EpisodeTask(
            prompt=prompt,
            group_id=f"{name}/{prompt.prompt_id}",
            episode_id=f"{name}/{prompt.prompt_id}/{k}",
            sampling=sampling,
            seed=seeds(prompt.prompt_id, k),
            priority=index * samples + k,
            max_tokens=max_tokens,
        )
        for index, prompt in enumerate(prompts)
        for k in range(samples)
    ]
