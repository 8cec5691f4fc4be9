"""Kinds of faults in schedules that users of comparable systems met: the right behaviour."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from miles_core.contracts.engines import EngineClient
from miles_core.contracts.environments import EpisodeTask
from miles_core.data.group import Batch, Episode, Group, Prompt
from miles_core.data.trajectory import Status, Trajectory
from miles_core.errors import MilesError
from miles_core.rollout.admission import AdmissionClient, EngineHold
from miles_core.rollout.episodes import run_episode
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.policy import EpisodeStart, SchedulePolicy
from miles_core.rollout.scheduler import Scheduler
from miles_core.rollout.staleness import reweighted, span_of
from miles_core.runs.recording import batch_metrics

POLICY = SchedulePolicy(
    mode="async", batch_groups=1, group_size=2, retries=0, max_drops=0, max_running=8, capacity=4, max_staleness=1
)


def scheduler_of(ledger: Ledger, **changes: object) -> Scheduler:
    def prompt_at(position: int) -> Prompt:
        return Prompt(prompt_id=f"p{position}", messages=())

    scheduler = Scheduler(dataclasses.replace(POLICY, **changes), ledger, prompt_at, seed=0)  # type: ignore[arg-type]
    scheduler.begin(0)
    return scheduler


def episode(start: EpisodeStart, versions: list[int], *, status: Status = Status.COMPLETED) -> Episode:
    trajectory = Trajectory(
        token_ids=np.ones(len(versions), np.int32),
        loss_mask=np.array(versions) >= 0,
        logprobs=np.where(np.array(versions) >= 0, -1.0, 0.0).astype(np.float32),
        versions=np.array(versions, np.int32),
        prompt_id=start.prompt.prompt_id,
        group_id=start.group_id,
        episode_id=start.episode_id,
        trajectory_id=f"{start.episode_id}.0",
        status=status,
    )
    return Episode(
        episode_id=start.episode_id,
        prompt_id=start.prompt.prompt_id,
        group_id=start.group_id,
        status=status,
        trajectories=(trajectory,),
    ).with_reward(1.0)


def finish(scheduler: Scheduler, starts: list[EpisodeStart], *versions: list[int]) -> None:
    for start, own in zip(starts, versions, strict=True):
        group = scheduler.episode_ended(episode(start, own))
        if group is not None:
            scheduler.group_scored(group, None)


@pytest.mark.parametrize(("stale", "trains"), [("drop", []), ("reweight", [[False] * 4, [False] * 2 + [True] * 2])])
def test_a_group_of_mixed_versions_is_as_old_as_its_oldest_token(stale: str, trains: list[list[bool]]) -> None:
    scheduler = scheduler_of(Ledger(Path(":memory:")), stale=stale, max_staleness=2)
    finish(scheduler, scheduler.starts()[:2], [-1, 2, 2, -1], [-1, 4, 6, 8])
    taken = scheduler.take(8) or []
    assert [t.loss_mask.tolist() for g in taken for t in g.trajectories] == trains


def test_a_version_counter_that_went_back_is_refused_and_not_taken_for_fresh() -> None:
    scheduler = scheduler_of(Ledger(Path(":memory:")))
    finish(scheduler, scheduler.starts()[:2], [-1, 57], [-1, 57])
    with pytest.raises(MilesError, match="tokens of version 57, and the trainer is at 1: versions went back"):
        scheduler.take(1)


def test_a_resume_loses_neither_what_ran_nor_what_was_finished() -> None:
    ledger = Ledger(Path(":memory:"))
    scheduler = scheduler_of(ledger)
    starts = scheduler.starts()
    assert len(starts) == 8
    finish(scheduler, starts[:2], [-1, 0], [-1, 0])
    finish(scheduler, starts[2:4], [-1, 0], [-1, 0])
    (batch,) = scheduler.take(0) or ()
    ledger.move([batch.group_id], "trained", step=0)
    ledger.rewind(1)
    again = scheduler_of(ledger).starts()
    assert [s.episode_id for s in again[:6]] == [s.episode_id for s in starts[2:]], "longest first, under their own ids"


def test_an_episode_that_runs_for_ever_fails_within_its_deadline() -> None:
    class Hangs:
        async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
            await asyncio.Event().wait()
            raise AssertionError

    scheduler = scheduler_of(Ledger(Path(":memory:")), mode="sync", batch_groups=1)
    first, second = scheduler.starts()
    scheduler.episode_ended(episode(first, [-1, 0]))
    task = EpisodeTask(
        prompt=second.prompt,
        group_id=second.group_id,
        episode_id=second.episode_id,
        sampling=None,  # type: ignore[arg-type]
        seed=0,
    )
    client = AdmissionClient(EngineHold(None), priority=0)  # type: ignore[arg-type]
    hung = asyncio.run(run_episode(Hangs(), task, client, timeout=0.05))  # type: ignore[arg-type]
    group = scheduler.episode_ended(hung)
    assert group is not None, "the batch does not wait for ever at all but one"
    assert scheduler.group_scored(group, None) == "failed"
    assert "episode_timeout = 0.05 s" in group.episodes[1].error
    assert {s.group_id for s in scheduler.starts()} == {"g0000001"}


def test_staleness_is_reported_of_what_trained_and_not_of_what_was_dropped() -> None:
    scheduler = scheduler_of(Ledger(Path(":memory:")))
    starts = scheduler.starts()
    finish(scheduler, starts[:2], [-1, 0], [-1, 5])
    finish(scheduler, starts[2:4], [-1, 4], [-1, 5])
    taken = scheduler.take(5) or ()
    metrics = batch_metrics(Batch(groups=tuple(taken), policy_version=5, step=5), None)
    assert scheduler.dropped == {"stale": 1}
    assert (metrics["staleness/max"], metrics["staleness/mean"], metrics["staleness/token_mean"]) == (1.0, 1.0, 0.5)


def test_masked_old_tokens_are_in_no_staleness() -> None:
    scheduler = scheduler_of(Ledger(Path(":memory:")), stale="reweight")
    finish(scheduler, scheduler.starts()[:2], [-1, 0], [-1, 5])
    taken = tuple(scheduler.take(5) or ())
    assert batch_metrics(Batch(groups=taken, policy_version=5, step=5), None)["staleness/max"] == 0.0


def test_an_empty_and_a_lone_token_answer_have_an_age() -> None:
    scheduler = scheduler_of(Ledger(Path(":memory:")))
    start = scheduler.starts()[0]
    empty = episode(start, [-1])
    lone = episode(start, [-1, 3])
    group = Group(group_id=start.group_id, prompt=start.prompt, episodes=(empty,))
    assert span_of(group) is None
    assert reweighted(group, oldest_allowed=9, decay=0.0).trajectories == group.trajectories
    assert span_of(dataclasses.replace(group, episodes=(empty, lone))) == (3, 3)
