"""The transaction's law under faults: either end is killed, hangs, lies or comes twice, at every step.

Whatever happens: an engine that is routed to serves exactly the weights of the version that it reports, and no engine
stays paused. Every fault is followed by a publish without one, after which all engines take part again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import PauseMode, Sampling
from miles_core.contracts.events import VersionPublished
from miles_core.contracts.transports import Published
from miles_core.engines.pool import EnginePool
from miles_core.errors import EngineUnavailable, EnvironmentFailure, PublishError
from miles_core.sync.broadcast import BroadcastConfig, BroadcastTransport
from miles_core.sync.shared_memory import SharedMemoryTransport
from miles_core.sync.transaction import publish
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

torch = pytest.importorskip("torch")

STAGED = ("/stage_weights", "/pause_generation", "/commit_weights", "/weights_checker", "/flush_cache")
"""With requests aborted; otherwise the engine switches between two steps:"""
ATOMIC = ("/stage_weights", "/switch_weights")
IN_PLACE = (
    "/pause_generation",
    "/init_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/weights_checker",
    "/update_weight_version",
    "/flush_cache",
)


def weights(version: int) -> Iterator[tuple[str, Any]]:
    generator = torch.Generator().manual_seed(version)
    yield "model.embed_tokens.weight", torch.randn(40, 8, generator=generator)
    for part in "qkv":
        yield f"model.layers.0.self_attn.{part}_proj.weight", torch.randn(8, 8, generator=generator)
    for expert in range(2):
        for part in ("gate", "up", "down"):
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            yield name, torch.randn(8, 8, generator=generator).to(torch.bfloat16)
    yield "model.norm.weight", torch.randn(8, generator=generator)


class Fleet:
    """Two stub engines, a pool, and the two ends of a transport."""

    def __init__(self, transport: str, engines: list[StubEngine], pool: EnginePool, directory: Path) -> None:
        self.transport, self.engines, self.pool = transport, engines, pool
        chosen: Any = (
            BroadcastTransport(BroadcastConfig(bucket_mb=1, timeout=1.5, join_timeout=1.5))
            if transport == "broadcast"
            else SharedMemoryTransport(ComponentConfig())
        )
        self.sender, self.receiver = chosen.sender(directory), chosen.receiver(directory)
        for engine in engines:
            engine.updates.timeout = 1.5
        self.truth: dict[int, dict[str, str]] = {}
        self.before_transfer: Callable[[], None] = lambda: None

    async def publish(
        self,
        version: int,
        *,
        mode: PauseMode = "retract",
        alter: Callable[[Published], Published] | None = None,
    ) -> VersionPublished:
        published = self.sender.send(version, weights(version))
        self.truth[version] = published.checksums
        if alter is not None:
            published = alter(published)

        async def transfer(session: Any) -> None:
            self.before_transfer()
            await asyncio.to_thread(self.sender.transfer, published, weights(version), session)

        return await publish(
            published, self.receiver, self.pool, mode=mode, transport=self.transport, transfer=transfer
        )

    def shorten(self) -> None:
        """Wait less for an engine that does not answer: the first publish had a busy machine's time."""
        http = self.receiver._http if self.transport == "broadcast" else self.receiver.engines.http
        http._deadline, self.pool._control_deadline = 5.0, 4.0

    def check(self) -> None:
        """The law."""
        for url, engine in zip(self.pool.urls, self.engines, strict=True):
            if url not in self.pool.drained:
                assert engine.weights == self.truth[engine.version], f"{url} claims version {engine.version}"
                assert not engine.paused, f"{url} stays paused"

    async def heals(self, version: int) -> None:
        done = await self.publish(version)
        assert done.engines == len(self.engines)
        self.check()
        assert {engine.version for engine in self.engines} == {version}
        assert not any(engine.paused for engine in self.engines)
        assert not self.pool.drained


@contextlib.asynccontextmanager
async def fleet(transport: str, directory: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [StubEngine(hashed_script(10, 2)) for _ in range(2)]
        urls = [await stack.enter_async_context(stub_engine(engine)) for engine in engines]
        pool = EnginePool(urls, deadline=5.0, wait_for_weights=True, control_deadline=30.0)
        stack.push_async_callback(pool.close)
        made = Fleet(transport, engines, pool, directory)
        try:
            await made.publish(1)
            made.check()
            made.shorten()
            yield made
        finally:
            await made.receiver.close()
            await asyncio.to_thread(made.sender.close)


def failing(step: str, fault: str, times: int = 1) -> Callable[[str], Any]:
    """Fail at the next `times` calls of one path."""
    left = [times]

    async def on_call(path: str) -> None:
        if path != step or not left[0]:
            return
        left[0] -= 1
        if fault == "refuses":
            raise web.HTTPConflict(text="refused by the test")
        if fault == "dies":  # the connection goes, and with it the answer
            raise asyncio.CancelledError
        await asyncio.sleep(30.0)

    return on_call


POINTS = [
    *(("shared_memory", step, fault) for step in (*STAGED, *ATOMIC[1:]) for fault in ("refuses", "dies")),
    *(("broadcast", step, fault) for step in IN_PLACE for fault in ("refuses", "dies")),
    ("shared_memory", "/commit_weights", "hangs"),
    ("shared_memory", "/switch_weights", "hangs"),
    ("broadcast", "/begin_weight_update", "hangs"),
    ("broadcast", "/update_weights_from_distributed", "hangs"),
    ("broadcast", "/weights_checker", "hangs"),
]


@pytest.mark.parametrize(("transport", "step", "fault"), POINTS, ids=[" ".join(p) for p in POINTS])
async def test_an_engine_fails_at_a_step(tmp_path: Path, transport: str, step: str, fault: str) -> None:
    async with fleet(transport, tmp_path) as made:
        if step == "/init_weights_update_group":  # a group is built once; after a failure, another
            await made.receiver.discard(made.pool.urls[0], made.sender.send(2, weights(2)))
        made.engines[1].on_call = failing(step, fault, times=4)
        with contextlib.suppress(PublishError):
            await made.publish(2, mode="abort" if step in STAGED[1:] else "retract")
        assert step in made.engines[1].calls
        made.check()
        assert not made.engines[0].paused
        made.engines[1].on_call = None
        await made.heals(3)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
async def test_an_engine_is_gone_and_comes_back(tmp_path: Path, transport: str) -> None:
    async with fleet(transport, tmp_path) as made:
        gone = made.engines[1]
        gone.gone = True
        done = await made.publish(2)
        assert (done.engines, done.drained) == (1, (made.pool.connections[1].url,))
        gone.gone = False
        gone.version, gone.weights = 0, {}  # started again
        made.check()
        await made.heals(3)


@pytest.mark.parametrize("gone", ["before it joins", "with all buckets unsent"])
async def test_the_sender_fails(tmp_path: Path, gone: str) -> None:
    async with fleet("broadcast", tmp_path) as made:

        def fail() -> None:
            if gone == "with all buckets unsent":
                made.sender._leave()
            raise EnvironmentFailure("the trainer is gone")

        made.before_transfer = fail
        with pytest.raises(PublishError, match="no engine is left that holds a verified version"):
            await made.publish(2)
        made.check()
        assert sorted(made.pool.drained) == sorted(made.pool.urls), "their weights are not known"
        assert not any(engine.paused for engine in made.engines)
        made.pool._deadline = 0.2
        with pytest.raises(EngineUnavailable, match="no engine holds a verified version"):
            await made.pool.generate([1, 2], Sampling(max_new_tokens=1))
        made.before_transfer = lambda: None
        await made.heals(3)


async def test_a_flipped_byte_is_sent_once_more(tmp_path: Path) -> None:
    async with fleet("broadcast", tmp_path) as made:
        made.engines[1].updates.corrupt = 1
        done = await made.publish(2)
        assert done.engines == 2
        made.check()


async def test_an_engine_whose_bytes_are_wrong_again_is_drained(tmp_path: Path) -> None:
    async with fleet("broadcast", tmp_path) as made:
        made.engines[1].updates.corrupt = 100
        done = await made.publish(2)
        assert (done.engines, done.drained) == (1, (made.pool.urls[1],))
        assert "has checksum" in made.pool.drained[made.pool.urls[1]]
        made.check()
        made.engines[1].updates.corrupt = 0
        await made.heals(3)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
async def test_a_wrong_checksum_of_the_trainer_is_never_committed(tmp_path: Path, transport: str) -> None:
    def lie(published: Published) -> Published:
        first = dataclasses.replace(published.tensors[0], checksum="0" * 32)
        return dataclasses.replace(published, tensors=(first, *published.tensors[1:]))

    async with fleet(transport, tmp_path) as made:
        with pytest.raises(PublishError):
            await made.publish(2, alter=lie)
        made.check()
        assert [engine.version for engine in made.engines] == [1, 1]
        await made.heals(3)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
async def test_two_publishers_at_once_take_turns(tmp_path: Path, transport: str) -> None:
    async with fleet(transport, tmp_path) as made:
        await asyncio.gather(made.publish(2), made.publish(3))
        made.check()
        await made.heals(4)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
async def test_a_publish_that_is_cancelled(tmp_path: Path, transport: str) -> None:
    async with fleet(transport, tmp_path) as made:
        step = "/switch_weights" if transport == "shared_memory" else "/end_weight_update"
        before = made.engines[1].calls.count(step)
        made.engines[1].on_call = failing(step, "hangs")
        task = asyncio.ensure_future(made.publish(2))
        while made.engines[1].calls.count(step) == before:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        made.engines[1].on_call = None
        made.check()
        assert not any(engine.paused for engine in made.engines)
        await made.heals(3)


async def test_requests_in_flight_leave_a_drained_engine(tmp_path: Path) -> None:
    async with fleet("broadcast", tmp_path) as made:
        made.engines[0].latency = made.engines[1].latency = 1.0
        request = asyncio.ensure_future(made.pool.generate([1, 2], Sampling(max_new_tokens=2)))
        await asyncio.sleep(0.2)
        first = next(url for url, engine in zip(made.pool.urls, made.engines, strict=True) if engine.requests)
        await made.pool.drain(first, "the test says so")
        found = await request
        assert found.engine != first
