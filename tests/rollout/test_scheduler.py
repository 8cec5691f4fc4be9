"""The scheduler as a state machine: whatever happens to episodes, no group is lost, doubled or trained stale."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.trajectory import Status, Trajectory
from miles_core.errors import MilesError
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.scheduler import EpisodeStart, SchedulePolicy, Scheduler


def prompt_at(position: int) -> Prompt:
    return Prompt(prompt_id=f"p{position}", messages=({"role": "user", "content": str(position)},))


def ended(start: EpisodeStart, *, version: int = 0, status: Status = Status.COMPLETED) -> Episode:
    trajectory = Trajectory(
        token_ids=np.array([1, 2]),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0.0, -1.0]),
        versions=np.array([-1, version]),
        prompt_id=start.prompt.prompt_id,
        group_id=start.group_id,
        episode_id=start.episode_id,
        trajectory_id=f"{start.episode_id}/t0",
        reward=1.0,
        status=status,
    )
    failed = status is Status.FAILED
    return Episode(
        episode_id=start.episode_id,
        prompt_id=start.prompt.prompt_id,
        group_id=start.group_id,
        status=status,
        trajectories=() if failed else (trajectory,),
        reward=None if failed else 1.0,
        error="broken" if failed else "",
    )


def policy(mode: Literal["sync", "async"] = "sync", **changes: object) -> SchedulePolicy:
    base: dict[str, object] = {
        "mode": mode,
        "batch_groups": 2,
        "group_size": 2,
        "retries": 1,
        "max_drops": 0,
        "max_running": 6,
    }
    return SchedulePolicy(**{**base, **changes})  # type: ignore[arg-type]


def make(chosen: SchedulePolicy) -> tuple[Scheduler, Ledger]:
    ledger = Ledger(Path(":memory:"))
    return Scheduler(chosen, ledger, prompt_at, seed=0), ledger


def finish(scheduler: Scheduler, start: EpisodeStart, *, drop: str | None = None, **how: object) -> str | None:
    group = scheduler.episode_ended(ended(start, **how))  # type: ignore[arg-type]
    return None if group is None else scheduler.group_scored(group, drop)


def test_sync_issues_exactly_one_batch_and_then_waits() -> None:
    scheduler, _ = make(policy())
    assert scheduler.starts() == [], "nothing before the trainer asks"
    scheduler.begin(0)
    starts = scheduler.starts()
    assert [s.group_id for s in starts] == ["g0000000", "g0000000", "g0000001", "g0000001"]
    assert [s.priority for s in starts] == [0, 1, 2, 3]
    assert scheduler.starts() == []
    for start in starts:
        assert scheduler.take(0) is None
        finish(scheduler, start)
    assert [g.group_id for g in scheduler.take(0) or ()] == ["g0000000", "g0000001"]
    assert scheduler.starts() == [], "nothing while the trainer works"


def test_sync_batch_is_in_issue_order_whatever_finishes_first() -> None:
    scheduler, _ = make(policy())
    scheduler.begin(0)
    for start in reversed(scheduler.starts()):
        finish(scheduler, start)
    assert [g.group_id for g in scheduler.take(0) or ()] == ["g0000000", "g0000001"]


def test_a_dropped_group_is_replaced_in_a_later_wave() -> None:
    scheduler, ledger = make(policy())
    scheduler.begin(0)
    first = scheduler.starts()
    for start in first[:2]:
        finish(scheduler, start, drop="zero_std")
    assert scheduler.starts() == [], "a wave is issued when the one before it has ended, or timing would decide"
    for start in first[2:]:
        finish(scheduler, start)
    second = scheduler.starts()
    assert {s.group_id for s in second} == {"g0000002"}
    for start in second:
        finish(scheduler, start)
    assert [g.group_id for g in scheduler.take(0) or ()] == ["g0000001", "g0000002"]
    assert ledger.drops() == {"zero_std": 1}


def test_a_failed_group_is_tried_again_under_its_own_id_then_dropped() -> None:
    scheduler, ledger = make(policy(batch_groups=1))
    scheduler.begin(0)
    for attempt in range(2):
        starts = scheduler.starts()
        assert [s.episode_id for s in starts] == [f"g0000000.{attempt}/0", f"g0000000.{attempt}/1"]
        reasons = [finish(scheduler, s, status=Status.FAILED) for s in starts]
    assert reasons[-1] == "failed"
    assert ledger.entries()[0].state == "dropped"
    assert scheduler.starts()[0].group_id == "g0000001"


def test_seeds_belong_to_prompt_attempt_and_episode() -> None:
    first, _ = make(policy())
    second, _ = make(policy())
    first.begin(0)
    second.begin(0)
    seeds = [s.seed for s in first.starts()]
    assert seeds == [s.seed for s in second.starts()]
    assert len(set(seeds)) == len(seeds)


def test_too_many_drops_stop_the_run_with_the_reason() -> None:
    scheduler, _ = make(policy(batch_groups=1, retries=0, max_drops=2))
    scheduler.begin(3)
    for start in scheduler.starts():
        finish(scheduler, start, status=Status.FAILED)
    first, second = scheduler.starts()
    finish(scheduler, first, status=Status.FAILED)
    with pytest.raises(MilesError, match=r"step 3 dropped 2 groups \(failed 2\).*broken"):
        finish(scheduler, second, status=Status.FAILED)


def test_a_resumed_ledger_goes_first() -> None:
    ledger = Ledger(Path(":memory:"))
    ledger.issue("g0000000", position=0, prompt_id="p0")
    ledger.move(["g0000000"], "running")
    ledger.rewind(0)
    scheduler = Scheduler(policy(), ledger, prompt_at, seed=0)
    scheduler.begin(0)
    assert [s.group_id for s in scheduler.starts()] == ["g0000000"] * 2 + ["g0000001"] * 2


class AnyLife(RuleBasedStateMachine):
    """Random completions, failures, filters, version bumps and batches."""

    @initialize(
        mode=st.sampled_from(["sync", "async"]),
        slot=st.sampled_from(["episode", "group"]),
        stale=st.sampled_from(["drop", "retry"]),
        order=st.sampled_from(["fifo", "freshest", "oldest_issue"]),
        max_running=st.integers(2, 8),
    )
    def start(
        self,
        mode: Literal["sync", "async"],
        slot: Literal["episode", "group"],
        stale: Literal["drop", "retry"],
        order: Literal["fifo", "freshest", "oldest_issue"],
        max_running: int,
    ) -> None:
        self.policy = policy(
            mode, slot=slot, stale=stale, order=order, max_running=max_running, max_staleness=1, max_drops=10_000
        )
        self.scheduler, self.ledger = make(self.policy)
        self.version = 0
        self.scheduler.begin(0)
        self.running: list[tuple[EpisodeStart, int]] = []
        self.scoring: list[Group] = []
        self.trained: list[str] = []
        self.seen: set[str] = set()

    @rule()
    def issue(self) -> None:
        for start in self.scheduler.starts():
            assert start.episode_id not in self.seen, "an episode id is never used twice"
            self.seen.add(start.episode_id)
            self.running.append((start, self.version))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_episode(self, data: st.DataObject) -> None:
        start, version = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        status = data.draw(st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.FAILED, Status.ABORTED]))
        group = self.scheduler.episode_ended(ended(start, version=version, status=status))
        if group is not None:
            assert len(group.episodes) == self.policy.group_size
            self.scoring.append(group)

    @precondition(lambda self: self.scoring)
    @rule(data=st.data(), drop=st.sampled_from([None, None, "zero_std"]))
    def score(self, data: st.DataObject, drop: str | None) -> None:
        self.scheduler.group_scored(self.scoring.pop(data.draw(st.integers(0, len(self.scoring) - 1))), drop)

    @rule()
    def take(self) -> None:
        taken = self.scheduler.take(self.version)
        if taken is None:
            return
        assert len(taken) == self.policy.batch_groups
        for group in taken:
            assert all(e.status is Status.COMPLETED for e in group.episodes)
            if self.policy.mode == "async":
                assert group.oldest_version is not None
                assert self.version - group.oldest_version <= self.policy.max_staleness
        ids = [g.group_id for g in taken]
        self.ledger.move(ids, "trained", step=self.version)
        self.trained += ids
        self.version += 1
        self.scheduler.begin(self.version)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.check()
        assert len(self.trained) == len(set(self.trained)) == counts.trained
        if self.policy.mode == "async":
            assert self.scheduler.running_episodes <= self.policy.max_running
            assert self.scheduler.depth <= self.policy.capacity * self.policy.batch_groups


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
