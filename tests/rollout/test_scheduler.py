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
from miles_core.rollout.policy import EpisodeStart, SchedulePolicy
from miles_core.rollout.scheduler import Scheduler


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


def test_over_sampling_trains_the_first_that_pass_and_returns_the_rest() -> None:
    scheduler, ledger = make(policy(over_sample=2))
    scheduler.begin(0)
    starts = scheduler.starts()
    assert len(starts) == 8
    for start in starts[2:]:  # the last three groups, of which the third finishes too late
        if start.group_id != "g0000002":
            finish(scheduler, start)
    assert [g.group_id for g in scheduler.take(0) or ()] == ["g0000001", "g0000003"]
    assert sorted(scheduler.withdrawn()) == ["g0000000", "g0000002"]
    assert scheduler.withdrawn() == []
    assert (scheduler.returned["surplus"], scheduler.running_episodes) == (2, 0)
    assert [e.reason for e in ledger.entries() if e.state == "pending"] == ["surplus", "surplus"]
    assert scheduler.episode_ended(ended(starts[0])) is None, "what a withdrawn group still reports is ignored"
    scheduler.begin(1)
    assert [s.episode_id for s in scheduler.starts()[:4]] == [
        f"{g}.1/{i}" for g in ("g0000000", "g0000002") for i in (0, 1)
    ]


def test_an_over_sampled_step_replaces_a_dropped_group_at_once() -> None:
    scheduler, _ = make(policy(over_sample=1))
    scheduler.begin(0)
    starts = scheduler.starts()
    for start in starts[:2]:
        finish(scheduler, start, drop="zero_std")
    assert {s.group_id for s in scheduler.starts()} == {"g0000003"}


def test_partial_keeps_what_runs_and_what_finished() -> None:
    scheduler, ledger = make(policy(over_sample=2, partial=True))
    scheduler.begin(0)
    starts = scheduler.starts()
    for start in starts[2:]:
        finish(scheduler, start)
    assert [g.group_id for g in scheduler.take(0) or ()] == ["g0000001", "g0000002"]
    assert (scheduler.withdrawn(), scheduler.running_episodes, scheduler.depth) == ([], 2, 1)
    assert scheduler.starts() == []
    scheduler.begin(1)
    assert {s.group_id for s in scheduler.starts()} == {"g0000004", "g0000005"}
    for start in starts[:2]:
        finish(scheduler, start)
    batch = scheduler.take(1) or ()
    assert [g.group_id for g in batch] == ["g0000000", "g0000003"]
    assert [g.oldest_version for g in batch] == [0, 0]
    assert ledger.check().open == 6


def mixed(version: int, **changes: object) -> tuple[Scheduler, Ledger, list[EpisodeStart]]:
    """A finished group of episodes of versions 0 and 2, and the trainer at `version`."""
    scheduler, ledger = make(policy("async", batch_groups=1, max_running=2, max_staleness=1, **changes))
    scheduler.begin(0)
    first, second = scheduler.starts()
    scheduler.take(version)
    finish(scheduler, first, version=0)
    finish(scheduler, second, version=2)
    return scheduler, ledger, scheduler.starts()


def test_resampling_generates_only_the_old_episodes_again() -> None:
    scheduler, ledger, starts = mixed(2, stale="resample")
    assert [s.episode_id for s in starts] == ["g0000000.1/0", "g0000001.0/0"]
    assert scheduler.returned == {"resample": 1}
    assert scheduler.take(2) is None, "a group is complete again before it can be taken"
    finish(scheduler, starts[0], version=2)
    (group,) = scheduler.take(2) or ()
    assert [e.episode_id for e in group.episodes] == ["g0000000.1/0", "g0000000.0/1"]
    assert ledger.entries()[0].attempt == 1


def test_resampling_ends() -> None:
    scheduler, ledger, starts = mixed(2, stale="resample", retries=1)
    finish(scheduler, starts[0], version=0)
    assert ledger.drops() == {"stale": 1}
    assert scheduler.drops() == [("g0000000", "stale")]


def test_reweighting_trains_the_younger_tokens_alone() -> None:
    scheduler, _, _ = mixed(2, stale="reweight")
    (group,) = scheduler.take(2) or ()
    assert [t.loss_mask.tolist() for t in group.trajectories] == [[False, False], [False, True]]
    assert all(t.weights is None for t in group.trajectories)


def test_a_decayed_weight_is_a_power_of_the_versions_over_the_bound() -> None:
    scheduler, _, _ = mixed(3, stale="reweight", stale_decay=0.5)
    (group,) = scheduler.take(3) or ()
    old, young = group.trajectories
    assert old.weights is not None
    assert old.weights.tolist() == [1.0, 0.25]
    assert young.weights is None
    assert old.loss_mask.tolist() == [False, True]


def test_reweighting_drops_a_group_of_which_nothing_is_left() -> None:
    _, ledger, _ = mixed(4, stale="reweight")
    assert ledger.drops() == {"stale": 1}


def test_a_smaller_size_lets_what_runs_go_on() -> None:
    scheduler, _ = make(policy("async", max_running=8, capacity=4))
    scheduler.begin(0)
    starts = scheduler.starts()
    assert len(starts) == 8
    scheduler.resize(max_running=2)
    for start in starts[:6]:
        finish(scheduler, start)
        assert scheduler.starts() == []
    finish(scheduler, starts[6])
    assert len(scheduler.starts()) == 1


class AnyLife(RuleBasedStateMachine):
    """Random completions, failures, filters, late reports, version bumps, sizes, batches and shutdowns; beside it the
    law of the ledger, recomputed from what was seen."""

    @initialize(
        mode=st.sampled_from(["sync", "async"]),
        slot=st.sampled_from(["episode", "group"]),
        stale=st.sampled_from(["drop", "retry", "reweight", "resample"]),
        order=st.sampled_from(["fifo", "freshest", "oldest_issue"]),
        max_running=st.integers(2, 8),
        over_sample=st.integers(0, 3),
        partial=st.booleans(),
        adaptive=st.booleans(),
    )
    def start(self, mode: Literal["sync", "async"], **chosen: object) -> None:
        self.policy = policy(mode, **chosen, max_staleness=1, max_drops=10_000)
        self.ledger = Ledger(Path(":memory:"))
        self.now = 0.0
        self.version = 0
        self.trained: dict[str, int] = {}
        self.limit = self.policy.max_running
        self.open()

    def open(self) -> None:
        """A scheduler over a ledger that was rewound: everything that ran is gone."""
        self.scheduler = Scheduler(self.policy, self.ledger, prompt_at, seed=0, clock=lambda: self.now)
        self.scheduler.begin(self.version)
        self.running: list[tuple[EpisodeStart, int]] = []
        self.late: list[EpisodeStart] = []
        self.scoring: list[Group] = []
        self.seen: set[str] = set()
        self.started: dict[str, int] = {}

    @rule()
    def issue(self) -> None:
        for start in self.scheduler.starts():
            assert start.episode_id not in self.seen, "an episode id is never used twice"
            self.seen.add(start.episode_id)
            self.running.append((start, self.version))

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_episode(self, data: st.DataObject) -> None:
        start, version = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        status = data.draw(st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.FAILED, Status.ABORTED]))
        group = self.scheduler.episode_ended(ended(start, version=version, status=status))
        if group is not None:
            assert len(group.episodes) == self.policy.group_size
            assert [e.episode_id.rpartition("/")[2] for e in group.episodes] == ["0", "1"]
            self.scoring.append(group)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def report_late(self, data: st.DataObject) -> None:
        late = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        assert self.scheduler.episode_ended(ended(late)) is None

    @precondition(lambda self: self.scoring)
    @rule(data=st.data(), drop=st.sampled_from([None, None, "zero_std"]))
    def score(self, data: st.DataObject, drop: str | None) -> None:
        self.scheduler.group_scored(self.scoring.pop(data.draw(st.integers(0, len(self.scoring) - 1))), drop)

    @precondition(lambda self: self.policy.mode == "async" and not self.policy.adaptive)
    @rule(max_running=st.integers(2, 8), capacity=st.floats(1, 4))
    def resize(self, max_running: int, capacity: float) -> None:
        self.scheduler.resize(max_running=max_running, capacity=capacity)
        self.limit = max(self.limit, max_running)

    @rule()
    def take(self) -> None:
        taken = self.scheduler.take(self.version)
        withdrawn = set(self.scheduler.withdrawn())
        if taken is None:
            assert not withdrawn
            return
        assert len(taken) == self.policy.batch_groups
        self.late += [s for s, _ in self.running if s.group_id in withdrawn]
        self.running = [(s, v) for s, v in self.running if s.group_id not in withdrawn]
        scoring, self.scoring = self.scoring, [g for g in self.scoring if g.group_id not in withdrawn]
        for group in scoring:
            if group.group_id in withdrawn:
                assert self.scheduler.group_scored(group, None) is None
        for group in taken:
            assert all(e.status is Status.COMPLETED for e in group.episodes)
            for trajectory in group.trajectories:
                ages = self.version - trajectory.versions[trajectory.loss_mask]
                assert (ages >= 0).all()
                assert (ages <= self.policy.max_staleness).all(), "no token over the bound trains"
        if self.policy.mode == "sync" and not self.policy.partial:
            assert (self.scheduler.running_episodes, self.scheduler.depth) == (0, 0)
        for group in taken:
            assert group.group_id not in self.trained, "nothing is trained twice"
            self.trained[group.group_id] = self.version
        self.ledger.move([g.group_id for g in taken], "trained", step=self.version)
        self.version += 1
        self.scheduler.begin(self.version)

    @rule(data=st.data())
    def shut_down_and_reopen(self, data: st.DataObject) -> None:
        self.version = data.draw(st.integers(max(0, self.version - 1), self.version))
        self.trained = {g: step for g, step in self.trained.items() if step < self.version}
        self.ledger.rewind(self.version)
        self.open()

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        counts = self.ledger.check()
        assert counts.trained == len(self.trained)
        assert self.scheduler.running_episodes == len(self.running)
        if self.policy.mode == "async":
            assert self.scheduler.running_episodes <= self.limit
            assert self.scheduler.depth <= 4 * self.policy.batch_groups


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
