"""Laws of rollout environments: every prompt gives one group, whatever happens to its episodes.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from miles_core.contracts.environments import EpisodeTask, RolloutEnvironment
from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.trajectory import Status
from miles_core.testing.kit import Case, Check
from miles_core.testing.leftovers import leftover_tasks

__all__ = ["CHECKS"]


async def every_prompt_yields_one_group(case: Case) -> None:
    prompts = _prompts(4)
    groups = await _groups(case, prompts, _Runner())
    found = sorted(group.prompt_id for group in groups)
    assert found == [prompt.prompt_id for prompt in prompts], f"4 prompts p0 to p3 gave groups of {found}"
    names = [group.group_id for group in groups]
    assert len(set(names)) == len(names), f"groups share an id: {names}"
    assert all(group.prompt in prompts for group in groups), "a group's prompt is not the one that was given"


async def groups_hold_the_episodes_that_ran(case: Case) -> None:
    runner = _Runner()
    groups = await _groups(case, _prompts(3), runner)
    names = [episode.episode_id for group in groups for episode in group.episodes]
    assert names, "no group has an episode"
    assert len(set(names)) == len(names), "two episodes share an id"
    if runner.tasks:  # an environment may run episodes by itself
        ran = {task.episode_id for task in runner.tasks}
        assert set(names) == ran, f"episodes {sorted(ran ^ set(names))} ran or are grouped, but not both"
        seeds = [task.seed for task in runner.tasks]
        assert len(set(seeds)) == len(seeds), "episodes share a seed: they would sample the same"


async def a_failed_episode_loses_no_group(case: Case) -> None:
    groups = await _groups(case, _prompts(3), _Runner(status=Status.FAILED))
    assert len(groups) == 3, f"3 prompts whose episodes failed gave {len(groups)} groups"
    assert all(e.status == Status.FAILED for g in groups for e in g.episodes), "a failed episode is no longer failed"


async def no_prompts_give_no_groups(case: Case) -> None:
    groups = await _groups(case, [], _Runner())
    assert not groups, f"no prompts gave {len(groups)} groups"


async def cancellation_leaves_nothing(case: Case) -> None:
    runner = _Runner(hang=True)
    before = asyncio.all_tasks()
    batch = asyncio.create_task(_groups(case, _prompts(3), runner))
    for _ in range(500):
        if runner.waiting or batch.done():
            break
        await asyncio.sleep(0.01)
    if not runner.waiting and not runner.tasks:
        batch.cancel()
        return  # it runs episodes by itself
    batch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await batch
    assert batch.cancelled(), "rollout() swallows its cancellation"
    assert not runner.waiting, f"{runner.waiting} episodes run on after the rollout was cancelled"
    left = leftover_tasks(before)
    assert not left, f"tasks of a cancelled rollout run on: {left}"


CHECKS: tuple[Check, ...] = (
    every_prompt_yields_one_group,
    groups_hold_the_episodes_that_ran,
    a_failed_episode_loses_no_group,
    no_prompts_give_no_groups,
    cancellation_leaves_nothing,
)


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": f"say {i}"},)) for i in range(count)]


class _Runner:
    """The core's way to run an episode: ends after a few turns of the event loop, or never."""

    def __init__(self, *, status: Status = Status.COMPLETED, hang: bool = False) -> None:
        self.status = status
        self.hang = hang
        self.tasks: list[EpisodeTask] = []
        self.waiting = 0

    async def __call__(self, task: EpisodeTask) -> Episode:
        self.tasks.append(task)
        self.waiting += 1
        try:
            await (asyncio.Event().wait() if self.hang else asyncio.sleep(0.001 * (len(self.tasks) % 3)))
        finally:
            self.waiting -= 1
        return Episode(
            episode_id=task.episode_id,
            prompt_id=task.prompt.prompt_id,
            group_id=task.group_id,
            status=self.status,
            trajectories=(),
            error="the script says so" if self.status is Status.FAILED else "",
        )


async def _groups(case: Case, prompts: Sequence[Prompt], run_episode: Callable[[EpisodeTask], Any]) -> list[Group]:
    environment: RolloutEnvironment[Any] = case.create()
    iterator = environment.rollout(prompts, run_episode)
    try:
        return [group async for group in iterator]
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()
