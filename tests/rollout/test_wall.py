"""The producer on a virtual clock: what the schedules are worth on a heavy-tailed task, and how what hangs ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.rewards import Reward, Sample
from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.trajectory import Status
from miles_core.rollout.episodes import score_group
from miles_core.rollout.policy import SchedulePolicy
from miles_core.testing.heavy_tail import HeavyTail, VirtualLoop, Wall, measure_wall

LOAD = HeavyTail(train_seconds=0.5, tool_seconds=0.1)
SYNC = SchedulePolicy(mode="sync", batch_groups=4, group_size=8, retries=2, max_drops=0)


def wall(**changes: Any) -> Wall:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(measure_wall(dataclasses.replace(SYNC, **changes), LOAD, steps=12))


def test_asynchronous_time_is_at_most_six_tenths_of_synchronous_time() -> None:
    sync = wall()
    asynchronous = wall(mode="async", max_running=128, capacity=3, max_staleness=4, stale="resample")
    print(f"sync {sync}, async {asynchronous}")
    assert asynchronous.seconds <= 0.6 * sync.seconds
    assert asynchronous.trainer_idle < 0.2 * asynchronous.seconds


def test_over_sampling_and_partial_shorten_a_synchronous_run() -> None:
    sync, over = wall(), wall(over_sample=2)
    partial = wall(over_sample=2, partial=True, max_staleness=8)
    assert partial.seconds < over.seconds < sync.seconds
    assert sync.staleness == over.staleness == 0 < partial.staleness


def test_the_virtual_clock_repeats_itself() -> None:
    assert wall(over_sample=2) == wall(over_sample=2)


class Hangs(Reward[ComponentConfig]):
    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        await asyncio.Event().wait()
        return [1.0] * len(samples)


def test_a_hanging_reward_fails_the_group_within_its_deadline() -> None:
    episode = Episode(
        episode_id="g.0/0", prompt_id="p", group_id="g", status=Status.COMPLETED, trajectories=(), messages=()
    )
    brought = dataclasses.replace(episode, episode_id="g.0/1", reward=0.5)
    group = Group(group_id="g", prompt=Prompt(prompt_id="p", messages=()), episodes=(episode, brought))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        scored = runner.run(score_group(group, Hangs(ComponentConfig()), reward_key=None, timeout=30))
        assert runner.get_loop().time() == pytest.approx(30, abs=0.1)
    assert [e.status for e in scored.episodes] == [Status.FAILED, Status.COMPLETED]
    assert "reward_timeout = 30 s" in scored.episodes[0].error
