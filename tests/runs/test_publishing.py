"""Publishing for a run stops when the care of the engines ends, whatever it was waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from miles_core.contracts.transports import Published, WeightReceiver
from miles_core.engines.pool import EnginePool
from miles_core.errors import EnvironmentFailure
from miles_core.runs.publishing import Publisher


class Trainer:
    async def publish(self, version: int) -> Published:
        return Published(version=version, tensors=(), address={}, seconds=0.0)


class Silent(WeightReceiver):
    """Of an engine that took the request and said no more."""

    atomic = True

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def stage(self, url: str, published: Published) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    async def commit(self, url: str, published: Published) -> None: ...

    async def discard(self, url: str, published: Published) -> None: ...

    async def close(self) -> None: ...


class Engine:
    """Its server ends when it is told, and cannot be started again."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def restarts(self) -> AsyncIterator[str]:
        await self.ended.wait()
        raise EnvironmentFailure("engine-0 cannot be started")
        yield ""


@asynccontextmanager
async def publishing() -> AsyncIterator[tuple[Publisher, Silent, Engine]]:
    pool, receiver, engine = EnginePool(["http://127.0.0.1:9"], wait_for_weights=True), Silent(), Engine()
    publisher = Publisher(
        cast(Any, Trainer()), pool, receiver, cast(Any, engine), cast(Any, None), mode="retract", transport="silent"
    )
    try:
        async with asyncio.timeout(20):
            yield publisher, receiver, engine
    finally:
        await publisher.close()
        await pool.close()


async def test_a_publish_does_not_wait_for_an_engine_that_is_not_started_again() -> None:
    async with publishing() as (publisher, receiver, engine):
        work = asyncio.ensure_future(publisher.publish(1))
        await receiver.asked.wait()
        engine.ended.set()
        with pytest.raises(EnvironmentFailure, match="cannot be started"):
            await work


async def test_nor_does_a_step_that_waits_for_its_turn() -> None:
    async with publishing() as (publisher, receiver, engine):
        first = asyncio.ensure_future(publisher.publish(1))
        await receiver.asked.wait()
        async with publisher.turn():
            waiting = asyncio.ensure_future(take(publisher))
            await asyncio.sleep(0.05)
            engine.ended.set()
            with pytest.raises(EnvironmentFailure, match="cannot be started"):
                await waiting
        with pytest.raises(EnvironmentFailure, match="cannot be started"):
            await first


async def take(publisher: Publisher) -> None:
    async with publisher.turn():
        pass
