"""The loop under faults, over a stub engine and a stub trainer: it ends, says why, and loses nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from miles_core import hookimpl
from miles_core.data.group import Batch
from miles_core.errors import ConfigError, MilesError, NumericsError, RunDirectoryError
from miles_core.runs.directory import RunDirectory
from miles_core.runs.loop import Run
from tests.runs.stubs import Setup

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(tmp_path, monkeypatch)


def test_a_run_trains_every_issued_group_once(setup: Setup) -> None:
    setup.go()
    assert setup.states() == ["trained"] * 6
    assert [b.policy_version for b in setup.trainer.batches] == [0, 1, 2]
    assert all(t.versions.max() == b.policy_version for b in setup.trainer.batches for t in b.trajectories)
    assert setup.engine.version == 3
    assert [e for e in setup.events if e.startswith("pub")] == [f"published {v}" for v in range(4)]
    assert setup.events[0] == "published 0"
    assert setup.events[-1] == "finished NoneType"
    assert not setup.engine.paused


def test_a_step_that_is_refused_keeps_the_batch_and_can_be_resumed(setup: Setup) -> None:
    setup.trainer.fail_at = 1
    with pytest.raises(NumericsError, match="loss is nan"):
        setup.go()
    run = RunDirectory(setup.directory / "tiny")
    assert run.rollout_file(2).exists(), "the batch is kept for inspection"
    assert setup.states() == ["trained"] * 2 + ["batched"] * 2
    assert setup.events[-1] == "finished NumericsError"
    setup.trainer.fail_at = None
    setup.go()
    assert setup.states() == ["trained"] * 6
    assert [g.group_id for b in setup.trainer.batches for g in b.groups] == [f"g{i:07d}" for i in range(6)]


def test_an_engine_that_answers_garbage_stops_the_run_with_its_answer(setup: Setup) -> None:
    setup.engine.garbage = True
    with pytest.raises(MilesError, match=r"dropped \d+ groups \(failed.*an answer to no request.*nonsense"):
        setup.go("schedule.max_drops=3", "schedule.retries=0")
    assert set(setup.states()) <= {"dropped", "pending", "running", "finished"}


def test_a_hanging_engine_is_given_up_at_the_deadline(setup: Setup) -> None:
    setup.engine.hang = True
    with pytest.raises(MilesError, match=r"episode_timeout = 0\.3 s"):
        setup.go("schedule.episode_timeout=0.3", "schedule.retries=0", "schedule.max_drops=2")


def test_a_refusing_engine_is_not_retried_for_ever(setup: Setup) -> None:
    setup.engine.refuse_with = 400
    with pytest.raises(MilesError, match="refused by the test"):
        setup.go("schedule.retries=0", "schedule.max_drops=2")


def test_a_reward_that_raises_drops_the_group_and_is_not_zero(setup: Setup) -> None:
    with pytest.raises(MilesError, match="no idea"):
        setup.go("reward.function=tests/runs/rewards.py:broken", "schedule.retries=1", "schedule.max_drops=2")
    assert "dropped failed" in setup.events
    assert not setup.trainer.batches


def test_a_reward_that_is_not_finite_is_refused(setup: Setup) -> None:
    with pytest.raises(MilesError, match="reward is nan"):
        setup.go("reward.function=tests/runs/rewards.py:nan", "schedule.retries=0", "schedule.max_drops=2")


def test_filtered_groups_are_replaced(setup: Setup) -> None:
    setup.go("filters=['nonzero_std']", "reward.function=tests/runs/rewards.py:sometimes_constant")
    states = setup.states()
    assert states.count("trained") == 6
    assert states.count("dropped") == len(states) - 6 > 0
    for batch in setup.trainer.batches:
        for group in batch.groups:
            assert len(set(group.rewards())) > 1


def test_a_corrupted_publish_does_not_advance_the_version(setup: Setup) -> None:
    def corrupt(run: Run) -> None:
        setup.engine.corrupt_staging = True

    with pytest.raises(MilesError, match="was not published"):
        setup.go(observer=corrupt)
    assert setup.engine.version == 0
    assert setup.engine.weights == {}
    assert not setup.engine.paused


def test_a_start_that_fails_stops_what_is_still_starting(setup: Setup) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="has no function absent"):
        setup.go("engine=slow", "reward.function=tests/runs/rewards.py:absent")
    assert time.monotonic() - begin < 30
    assert setup.events == ["finished ConfigError"]


def test_a_plugin_may_not_add_or_lose_groups(setup: Setup) -> None:
    class Loses:
        @hookimpl
        def miles_batch_ready(self, batch: Batch) -> Batch:
            return Batch(groups=batch.groups[:1], policy_version=batch.policy_version, step=batch.step)

    setup.plugins.register(Loses(), name="loses")
    with pytest.raises(RunDirectoryError, match="other groups"):
        setup.go()


def test_a_run_directory_is_never_overwritten(setup: Setup) -> None:
    run = setup.go()
    with pytest.raises(RunDirectoryError, match="never overwritten"):
        RunDirectory.create(run.path, setup.config(), setup.plugins)


def test_two_writers_are_kept_apart(setup: Setup) -> None:
    run = setup.go()
    first = RunDirectory.open(run.path, write=True)
    with pytest.raises(RunDirectoryError, match="in use by process"):
        RunDirectory.open(run.path, write=True)
    first.unlock()
    RunDirectory.open(run.path, write=True).unlock()


def test_the_asynchronous_mode_trains_within_its_staleness(setup: Setup) -> None:
    setup.engine.latency = 0.01
    setup.go("schedule.mode=async", "run.steps=6", "schedule.max_running=12", "schedule.max_staleness=1")
    assert len(setup.trainer.batches) == 6
    for batch in setup.trainer.batches:
        assert max(batch.staleness()) <= 1
        assert len(batch.groups) == 2
    trained = [g.group_id for b in setup.trainer.batches for g in b.groups]
    assert len(trained) == len(set(trained)) == setup.states().count("trained")


def test_surplus_groups_are_taken_first_by_the_next_step(setup: Setup) -> None:
    setup.go("schedule.over_sample=1")
    trained = [g for b in setup.trainer.batches for g in b.groups]
    assert len({g.group_id for g in trained}) == len(trained) == setup.states().count("trained") == 6
    assert setup.states().count("pending") == 1, "what the last step left over"
    assert {g.group_id for g in trained} | {"g0000006"} >= {f"g{i:07d}" for i in range(6)}
    assert all(set(b.staleness()) == {0} for b in setup.trainer.batches)
