"""Laws of engines: healthy URLs, samples over the protocol, and an end that stops what was started and no more.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Engine, EngineStart, Sampling
from miles_core.contracts.launchers import Process, ProcessSpec
from miles_core.engines.client import EngineConnection
from miles_core.errors import EngineError, EngineRefusal
from miles_core.http import JsonHttp
from miles_core.runs.launcher import LocalLauncher
from miles_core.testing.kit import ENGINE_VERSION, Case, Check
from miles_core.testing.tiny import tiny_model

__all__ = ["CHECKS"]


async def urls_are_healthy_until_stop(case: Case) -> None:
    engine = case.create()
    async with _launcher() as launcher, _http() as http:
        try:
            urls = await engine.start(launcher, _start(case))
            assert urls, "start() gives no URL"
            for url in urls:
                assert await _healthy(http, url), f"{url} does not answer /health once start() has returned"
        finally:
            await engine.stop()
        left = [process.ready for process in launcher.processes if process.alive()]
        assert not left, f"processes that start() launched run on after stop(): {left}"
        for url in urls:
            alive = await _healthy(http, url)
            assert alive or launcher.processes, f"stop() ended {url}, which is the user's and not the run's"
        await engine.stop()


async def it_samples_over_the_protocol(case: Case) -> None:
    async with _connected(case) as connection:
        sampling = Sampling(max_new_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
        first = await connection.generate([5, 6, 7, 8], sampling)
        again = await connection.generate([5, 6, 7, 8], sampling)
        assert 0 < len(first.token_ids) <= 5, f"{len(first.token_ids)} tokens were sampled, 1 to 5 were asked for"
        assert first.prompt_tokens == 4, f"a prompt of 4 tokens is counted as {first.prompt_tokens}"
        assert bool((first.logprobs <= 0).all()), f"a log-prob is above 0: {first.logprobs.tolist()}"
        assert set(first.versions.tolist()) == {ENGINE_VERSION}, (
            f"tokens carry the versions {first.versions.tolist()}, the engine was started at {ENGINE_VERSION}"
        )
        assert np.array_equal(first.token_ids, again.token_ids), "one seed samples two different continuations"


async def a_bad_request_is_refused_and_harmless(case: Case) -> None:
    async with _connected(case) as connection:
        try:
            found = await connection.generate([10**8], Sampling(max_new_tokens=2))
        except EngineRefusal:
            pass
        except EngineError as error:
            raise AssertionError(f"an id outside the vocabulary is no refusal (4xx): {error}") from error
        else:
            raise AssertionError(f"the id 100000000 is taken, and continued with {found.token_ids.tolist()}")
        await connection.generate([5], Sampling(max_new_tokens=1))


@contextlib.asynccontextmanager
async def _connected(case: Case) -> AsyncIterator[EngineConnection]:
    async with _served(case) as (url, http):
        connection = EngineConnection(url, http)
        try:
            yield connection
        finally:
            await connection.close()


CHECKS: tuple[Check, ...] = (
    urls_are_healthy_until_stop,
    it_samples_over_the_protocol,
    a_bad_request_is_refused_and_harmless,
)


class _CountingLauncher(LocalLauncher):
    """Keeps every process that it launched."""

    def __init__(self) -> None:
        super().__init__(ComponentConfig())
        self.processes: list[Process] = []

    async def launch(self, spec: ProcessSpec) -> Any:
        process = await super().launch(spec)
        self.processes.append(process)
        return process


@contextlib.asynccontextmanager
async def _launcher() -> AsyncIterator[_CountingLauncher]:
    launcher = _CountingLauncher()
    try:
        yield launcher
    finally:
        await launcher.close()


@contextlib.asynccontextmanager
async def _http() -> AsyncIterator[JsonHttp]:
    http = JsonHttp(deadline=30.0)
    try:
        yield http
    finally:
        await http.close()


@contextlib.asynccontextmanager
async def _served(case: Case) -> AsyncIterator[tuple[str, JsonHttp]]:
    engine: Engine[Any] = case.create()
    async with _launcher() as launcher, _http() as http:
        try:
            urls = await engine.start(launcher, _start(case))
            yield urls[0], http
        finally:
            await engine.stop()


def _start(case: Case) -> EngineStart:
    directory: Path = case.new_directory()
    return EngineStart(
        model_directory=tiny_model(),
        dtype="float32",
        run_directory=directory,
        wait_for_weights=False,
        policy_version=ENGINE_VERSION,
        environment={},
    )


async def _healthy(http: JsonHttp, url: str) -> bool:
    try:
        await http.call("GET", f"{url}/health", deadline=2.0)
    except EngineError:
        return False
    return True
