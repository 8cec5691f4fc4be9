"""Faults of rollout environments."""

from __future__ import annotations

import asyncio
import dataclasses

from miles_core.data.trajectory import Status
from planted_faults import scaffolded

Good = scaffolded("rollout_environments")
GOOD = (Good,)


class LosesOne(Good):
    """Loses the last group."""

    async def rollout(self, prompts, run_episode):
        left = len(prompts)
        async for group in super().rollout(prompts, run_episode):
            left -= 1
            if left:
                yield group


class Doubles(Good):
    """Yields one twice."""

    async def rollout(self, prompts, run_episode):
        async for group in super().rollout(prompts, run_episode):
            yield group
            if group.prompt_id == "p0":
                yield group


class OwnPrompts(Good):
    """Changes what was asked."""

    async def rollout(self, prompts, run_episode):
        async for group in super().rollout(prompts, run_episode):
            yield dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, label="mine"))


class KeepsTheBest(Good):
    """Runs episodes that are in no group."""

    async def rollout(self, prompts, run_episode):
        async for group in super().rollout(prompts, run_episode):
            yield dataclasses.replace(group, episodes=group.episodes[:1])


class OneSeed(Good):
    """All episodes sample the same."""

    async def rollout(self, prompts, run_episode):
        async def seeded(task):
            return await run_episode(dataclasses.replace(task, seed=1))

        async for group in super().rollout(prompts, seeded):
            yield group


class DropsFailed(Good):
    """A failed group is no group."""

    async def rollout(self, prompts, run_episode):
        async for group in super().rollout(prompts, run_episode):
            if all(episode.status is not Status.FAILED for episode in group.episodes):
                yield group


class Pardons(Good):
    """A failed episode was completed."""

    async def rollout(self, prompts, run_episode):
        async for group in super().rollout(prompts, run_episode):
            episodes = tuple(dataclasses.replace(e, status=Status.COMPLETED) for e in group.episodes)
            yield dataclasses.replace(group, episodes=episodes)


class NeedsOne(Good):
    """Makes up a prompt where there is none."""

    async def rollout(self, prompts, run_episode):
        from miles_core.data.group import Prompt

        async for group in super().rollout(prompts or [Prompt(prompt_id="x", messages=())], run_episode):
            yield group


class Detached(Good):
    """Leaves its episodes running."""

    async def rollout(self, prompts, run_episode):
        groups = [asyncio.ensure_future(self._group(prompt, run_episode)) for prompt in prompts]
        for finished in asyncio.as_completed(groups):
            yield await finished


FAULTS = {
    "every_prompt_yields_one_group": (LosesOne, Doubles, OwnPrompts),
    "groups_hold_the_episodes_that_ran": (KeepsTheBest, OneSeed),
    "a_failed_episode_loses_no_group": (DropsFailed, Pardons),
    "no_prompts_give_no_groups": (NeedsOne,),
    "cancellation_leaves_nothing": (Detached,),
}
