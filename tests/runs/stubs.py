"""A run over a stub engine and a stub trainer, in this process: for what does not depend on numbers."""

from __future__ import annotations

import contextlib
import sys
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
from miles_core.data.checksums import checksum
from miles_core.data.group import Batch, Group
from miles_core.errors import NumericsError
from miles_core.plugins import PluginManager
from miles_core.rollout.ledger import Ledger
from miles_core.runs import loop
from miles_core.runs.directory import RunDirectory
from miles_core.runs.loop import Run, train
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

    async def begin_export(self, directory: Path) -> None:
        await self.export(directory)

    async def finish_export(self, *, wait: bool) -> bool:
        return True

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
