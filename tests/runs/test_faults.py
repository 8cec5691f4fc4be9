"""What hangs, dies, fills up or talks nonsense: the run goes on, or stops with a clear error within its deadline;
nothing is counted twice, and neither a process nor a port is left behind."""

from __future__ import annotations

import asyncio
import errno
import resource
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from miles_core import hookimpl
from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Engine, EngineClient
from miles_core.contracts.environments import EpisodeTask
from miles_core.contracts.rewards import Reward, Sample
from miles_core.data.group import Episode
from miles_core.errors import EnvironmentFailure, MilesError, RunDirectoryError
from miles_core.rollout.environments.single_turn import SingleTurn
from miles_core.runs import loop
from miles_core.runs.directory import RunDirectory
from miles_core.testing.leftovers import children, listening
from tests.runs.stubs import Setup

ONCE = ("schedule.retries=0", "schedule.max_drops=2")
ALL = [f"g{i:07d}" for i in range(6)]


class Faults(Setup):
    """A run over stubs, with components that can be told to misbehave."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path, monkeypatch)
        self.hanging: set[str] = set()
        setup = self

        class Hangs(SingleTurn):
            """Never ends the episodes in `hanging`: a tool, a sandbox or an agent that hangs."""

            async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
                if task.episode_id in setup.hanging:
                    await asyncio.Event().wait()
                return await super().generate(task, engine)

        class Raises(Reward[ComponentConfig]):
            """Raises what no reward should."""

            async def score(self, samples: Sequence[Sample]) -> list[Any]:
                raise KeyError("answer")

        class Forgets(Reward[ComponentConfig]):
            """Loses a score."""

            async def score(self, samples: Sequence[Sample]) -> list[Any]:
                return [1.0] * (len(samples) - 1)

        class Mortal(Engine[ComponentConfig]):
            """The stub engine. `die` ends its server; with `revives`, it comes back under its URL without weights."""

            async def start(self, launcher: object, start: object) -> list[str]:
                setup.mortal = self
                self.dead = asyncio.Event()
                self.runner = web.AppRunner(setup.engine.application(), shutdown_timeout=0.05)
                await self.runner.setup()
                self.site = web.TCPSite(self.runner, "127.0.0.1", setup.port)
                await self.site.start()
                setup.port = self.runner.addresses[0][1]
                return [f"http://127.0.0.1:{setup.port}"]

            async def die(self) -> None:
                await self.runner.cleanup()
                self.dead.set()

            async def stop(self) -> None:
                if hasattr(self, "runner"):
                    await self.runner.cleanup()

            async def restarts(self) -> AsyncIterator[str]:
                await self.dead.wait()
                if not setup.revives:
                    raise EnvironmentFailure("the engine ended; its log is engine.log. Continue with `miles resume`.")
                await asyncio.sleep(0.2)
                setup.engine.version, setup.engine.weights = -1, {}
                yield (await self.start(None, None))[0]
                await asyncio.Event().wait()

        class Plugin:
            @hookimpl
            def miles_generate_environments(self) -> dict[str, type]:
                return {"hangs": Hangs}

            @hookimpl
            def miles_rewards(self) -> dict[str, type]:
                return {"raises": Raises, "forgets": Forgets}

            @hookimpl
            def miles_engines(self) -> dict[str, type]:
                return {"mortal": Mortal}

        self.port, self.revives = 0, True
        self.full = True
        self.mortal: Any = None
        self.plugins.register(Plugin(), name="faults")

    def forget_unsaved(self) -> None:
        """What was trained behind the last checkpoint is lost with its weights."""
        saved = RunDirectory(self.directory / "tiny").checkpoints()
        self.trainer.batches = self.trainer.batches[: saved[-1][0] if saved else 0]

    def trained(self) -> list[str]:
        return [g.group_id for b in self.trainer.batches for g in b.groups]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Fails a test that leaves a process or a port, or takes longer than any deadline of it."""
    processes, ports = children(), listening()
    begin = time.monotonic()
    yield Faults(tmp_path, monkeypatch)
    assert children() <= processes
    assert listening() <= ports
    assert time.monotonic() - begin < 30


def test_an_episode_that_hangs_is_tried_again_and_the_run_goes_on(setup: Faults) -> None:
    setup.hanging = {"g0000001.0/0", "g0000003.0/1"}
    setup.go("environment=hangs", "schedule.episode_timeout=0.4")
    assert sorted(setup.trained()) == ALL
    assert setup.states() == ["trained"] * 6


def test_an_episode_that_always_hangs_costs_its_group_alone(setup: Faults) -> None:
    setup.hanging = {f"g0000001.{attempt}/0" for attempt in range(9)}
    setup.go("environment=hangs", "schedule.episode_timeout=1", "schedule.retries=1")
    assert "g0000001" not in setup.trained()
    assert len(set(setup.trained())) == 6
    assert setup.states().count("dropped") == 1


def test_a_reward_that_hangs_fails_within_its_deadline(setup: Faults) -> None:
    with pytest.raises(MilesError, match=r"reward_timeout = 0\.3 s"):
        setup.go("reward.function=tests/runs/rewards.py:hangs", "schedule.reward_timeout=0.3", *ONCE)
    assert not setup.trainer.batches


@pytest.mark.parametrize(
    ("reward", "reason"),
    [("raises", r"the reward \(Raises\) raised KeyError: 'answer'"), ("forgets", "gave 1 scores for 2 samples")],
)
def test_a_reward_that_breaks_fails_its_episodes_and_not_the_producer(setup: Faults, reward: str, reason: str) -> None:
    with pytest.raises(MilesError, match=rf"dropped 2 groups \(failed 2\).*{reason}"):
        setup.go(f"reward={{use='{reward}'}}", *ONCE)
    assert set(setup.states()) <= {"dropped", "pending", "running"}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_dead_engine_comes_back_and_serves_nothing_before_its_version(setup: Faults, mode: str) -> None:
    killed: list[int] = []

    async def die(path: str) -> None:
        if path == "/generate" and setup.engine.version == 1 and not killed:
            killed.append(1)
            asyncio.get_running_loop().create_task(setup.mortal.die())
            await asyncio.sleep(0.3)

    setup.engine.on_call = die
    setup.go("engine=mortal", f"schedule.mode={mode}", "trackers=[]")
    assert killed
    assert len(set(setup.trained())) == len(setup.trained()) == 6
    assert setup.engine.version == 3
    versions = {int(v) for b in setup.trainer.batches for t in b.trajectories for v in t.versions[t.loss_mask]}
    assert versions <= {0, 1, 2}, "nothing was sampled by an engine that held no published version"


def test_an_engine_that_is_gone_for_good_stops_the_run_and_names_log_and_way_on(setup: Faults) -> None:
    setup.revives = False

    async def die(path: str) -> None:
        if path == "/generate" and setup.engine.version == 1:
            asyncio.get_running_loop().create_task(setup.mortal.die())
            await asyncio.sleep(0.3)

    setup.engine.on_call = die
    with pytest.raises(EnvironmentFailure, match=r"engine\.log.*miles resume"):
        setup.go("engine=mortal")
    setup.engine.on_call = None
    setup.forget_unsaved()
    setup.go("engine=mortal")
    assert sorted(setup.trained()) == ALL
    assert setup.states() == ["trained"] * 6


def test_a_full_disk_under_the_ledger_stops_the_run_and_resume_takes_the_step_again(setup: Faults) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full:
        @hookimpl
        def miles_before_train_step(self, batch: Any) -> None:
            if batch.step == 1 and setup.full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))

    setup.plugins.register(Full(), name="full")
    try:
        with pytest.raises(RunDirectoryError, match=r"could not be written to .*Free some space.*miles resume"):
            setup.go()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        setup.full = False
    setup.forget_unsaved()
    setup.go()
    assert setup.states() == ["trained"] * 6
    assert sorted(setup.trained()) == ALL


def test_a_full_disk_under_the_rollouts_names_the_batch(setup: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    write = loop.write_rollouts

    def full(path: Path, *arguments: Any, step: int, **rest: Any) -> None:
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *arguments, step=step, **rest)

    monkeypatch.setattr(loop, "write_rollouts", full)
    with pytest.raises(RunDirectoryError, match=r"the batch of step 2 could not be written.*No space left"):
        setup.go()
    assert setup.states().count("trained") == 2
