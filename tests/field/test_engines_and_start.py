"""Kinds of faults around engines and the start of a run that users of comparable systems met: the right behaviour."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_core.cli.train import train
from miles_core.contracts.engines import Sampling
from miles_core.engines.pool import EnginePool
from miles_core.errors import ConfigError, EngineUnavailable
from miles_core.runs.launcher import LocalLauncher
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

ROOT = Path(__file__).parents[2]
SAMPLING = Sampling(max_new_tokens=4)


async def test_a_recovered_engine_answers_nothing_before_it_holds_the_version() -> None:
    engine = StubEngine(hashed_script(50, 4), version=3)
    async with stub_engine(engine) as url:
        pool = EnginePool([url], wait_for_weights=True, deadline=0.4)
        pool.admit(url, 3)
        assert set((await pool.generate([1], SAMPLING)).versions.tolist()) == {3}
        await pool.drain(url, "it was started again")
        engine.requests.clear()
        with pytest.raises(EngineUnavailable, match="it was started again"):
            await pool.generate([1], SAMPLING)
        assert not engine.requests
        pool.admit(url, 4)
        engine.version = 4
        assert set((await pool.generate([1], SAMPLING)).versions.tolist()) == {4}
        await pool.close()


async def test_base_weights_of_a_recovery_that_nobody_noticed_are_no_sample() -> None:
    engine = StubEngine(hashed_script(50, 4), version=3)
    async with stub_engine(engine) as url:
        pool = EnginePool([url], wait_for_weights=True, deadline=0.4)
        pool.admit(url, 3)
        engine.version = "default"  # type: ignore[assignment]
        with pytest.raises(EngineUnavailable, match="nothing was published to it"):
            await pool.generate([1], SAMPLING)
        assert pool.drained
        await pool.close()


async def test_a_prefix_that_old_weights_computed_is_asked_for_by_nobody_after_an_update() -> None:
    engine = StubEngine(hashed_script(50, 4))
    async with stub_engine(engine) as url:
        pool = EnginePool([url], wait_for_weights=True)
        for version in (1, 2):
            pool.admit(url, version)
            engine.version = version
            await pool.generate([1, 2, 3], SAMPLING)
        keys = [request["extra_key"] for request in engine.requests]
        assert len(set(keys)) == 2, "the same prompt, and two caches"
        await pool.close()


def test_everything_wrong_with_a_config_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(LocalLauncher, "launch", never)
    monkeypatch.chdir(ROOT)
    bad = [f"run.directory={tmp_path}", "schedule.group_size=1", "engine=embeded", "transport=shared_memori"]
    begin = time.monotonic()
    done = CliRunner().invoke(train, ["examples/tiny.toml", *(part for one in bad for part in ("--set", one))])
    assert time.monotonic() - begin < 20
    assert isinstance(done.exception, ConfigError)
    assert {p.key for p in done.exception.problems} >= {"schedule.group_size", "engine.use", "transport.use"}
    assert not list(tmp_path.iterdir())
