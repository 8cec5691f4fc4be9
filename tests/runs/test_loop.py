"""The loop under faults, over a stub engine and a stub trainer: it ends, says why, and loses nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_core import hookimpl
from miles_core.config.load import LoadedConfig, load_config
from miles_core.contracts.backends import StepReport
from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Engine
from miles_core.contracts.launchers import ProcessSpec
from miles_core.contracts.transports import Published, TensorInfo
from miles_core.data.group import Batch, Group
from miles_core.errors import ConfigError, MilesError, NumericsError, RunDirectoryError
from miles_core.plugins import PluginManager
from miles_core.rollout.ledger import Ledger
from miles_core.runs import loop
from miles_core.runs.directory import RunDirectory
from miles_core.runs.loop import Run, train
from miles_core.sync.checksums import checksum
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

ROOT = Path(__file__).parents[2]


class StubTrainer:
    """Answers as the trainer process would, after recording what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.batches: list[Batch] = []
        self.fail_at: int | None = None

    async def start(self, *_: object) -> None: ...

    async def train_step(self, batch: Batch) -> StepReport:
        if len(self.batches) == self.fail_at:
            raise NumericsError("loss is nan in trajectories t0; the optimizer has not moved")
        self.batches.append(batch)
        return StepReport(step=batch.step + 1, loss=0.5, grad_norm=1.0, learning_rate=0.1, metrics={}, seconds={})

    async def publish(self, version: int) -> Published:
        data = version.to_bytes(4, "little")
        path = self.directory / f"weights-{version}"
        path.write_bytes(data)
        tensor = TensorInfo(name="w", dtype="uint8", shape=(4,), nbytes=4, checksum=checksum(data))
        return Published(version=version, tensors=(tensor,), address={"path": str(path)}, seconds=0.0)

    async def begin_save(self, directory: Path) -> None:
        directory.mkdir()

    async def finish_save(self, *, wait: bool) -> bool:
        return True

    async def load(self, directory: Path) -> None: ...

    async def export(self, directory: Path) -> None:
        (directory / "model").write_text("x")

    async def peak_memory(self) -> int:
        return 1

    async def close(self) -> None: ...


class Setup:
    """A run over stubs. `engine` may be told to misbehave before `go`."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = StubEngine(hashed_script(200, 4))
        self.trainer = StubTrainer(tmp_path)
        self.events: list[str] = []
        self.directory = tmp_path / "runs"
        self.plugins = PluginManager.discover(enable=["core"])
        self.plugins.register(self._plugin(), name="stubs")

        async def launch(*_: object, **__: object) -> StubTrainer:
            return self.trainer

        monkeypatch.setattr(loop.TrainerClient, "launch", launch)
        monkeypatch.chdir(ROOT)

    def _plugin(self) -> object:
        setup = self

        class Stub(Engine[ComponentConfig]):
            """The stub engine, in this process."""

            async def start(self, launcher: object, start: object) -> list[str]:
                self.stack = contextlib.AsyncExitStack()
                return [await self.stack.enter_async_context(stub_engine(setup.engine))]

            async def stop(self) -> None:
                if hasattr(self, "stack"):
                    await self.stack.aclose()

        class Slow(Stub):
            """Launches a process that is never ready."""

            async def start(self, launcher: Any, start: Any) -> list[str]:
                command = [sys.executable, "-c", "import time; time.sleep(60)"]
                await launcher.launch(ProcessSpec(name="slow", command=command, log=setup.directory / "slow.log"))
                raise AssertionError("it was never ready")

        class Plugin:
            @hookimpl
            def miles_engines(self) -> dict[str, type]:
                return {"stub": Stub, "slow": Slow}

            @hookimpl
            def miles_run_started(self, run: Any) -> None:
                setup.events.append("started")

            @hookimpl
            def miles_group_finished(self, group: Group) -> None:
                setup.events.append("group")

            @hookimpl
            def miles_group_dropped(self, group_id: str, reason: str) -> None:
                setup.events.append(f"dropped {reason}")

            @hookimpl
            def miles_version_published(self, published: Any) -> None:
                setup.events.append(f"published {published.version}")

            @hookimpl
            def miles_run_finished(self, error: BaseException | None) -> None:
                setup.events.append(f"finished {type(error).__name__}")

        return Plugin()

    def config(self, *overrides: str) -> LoadedConfig:
        base = [
            f"run.directory={self.directory}",
            "engine=stub",
            "run.steps=3",
            "run.checkpoint_every=1",
            "schedule.batch_groups=2",
            "schedule.group_size=2",
            "trackers=[]",
            "evaluation.datasets=[]",
            "reward.function=tests/runs/rewards.py:length",
        ]
        return load_config(ROOT / "examples" / "tiny.toml", [*base, *overrides])

    def go(self, *overrides: str, observer: Callable[[Run], Any] | None = None) -> RunDirectory:
        loaded = self.config(*overrides)
        path = self.directory / "tiny"
        run = RunDirectory.open(path, write=True) if path.exists() else RunDirectory.create(path, loaded, self.plugins)
        try:
            train(loaded, self.plugins, run, observer=observer)
        finally:
            run.unlock()
        return run

    def states(self) -> list[str]:
        ledger = Ledger(self.directory / "tiny" / "ledger.sqlite")
        try:
            assert ledger.check().holds
            return [e.state for e in ledger.entries()]
        finally:
            ledger.close()


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
