"""Publishing for a run: the trainer's weights to all engines after a step, and to engines that come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from miles_core.contracts.engines import Engine, PauseMode
from miles_core.contracts.events import VersionPublished
from miles_core.contracts.transports import Published, WeightReceiver
from miles_core.engines.pool import EnginePool
from miles_core.errors import EngineError, PublishError
from miles_core.runs.recording import Recorder
from miles_core.runs.trainer import TrainerClient
from miles_core.sync.transaction import publish

__all__ = ["Publisher"]

_PERIOD = 1.0
_POLL = 0.05
_ATTEMPTS = 3
"""Of publishing one version, when every engine is lost each time, and started again."""

Result = TypeVar("Result")


class Publisher:
    """Keeps the engines on the trainer's version.

    A `turn` is held while the trainer's weights change, until they are published: what is published under a version
    number are that version's weights. Meanwhile, and between steps, engines that were drained or started again are
    looked after: as soon as one answers, it gets the current version.
    """

    def __init__(
        self,
        trainer: TrainerClient,
        pool: EnginePool,
        receiver: WeightReceiver,
        engine: Engine[Any],
        record: Recorder,
        *,
        mode: PauseMode,
        transport: str,
    ) -> None:
        self._moving = asyncio.Lock()
        self._trainer = trainer
        self._pool = pool
        self._receiver = receiver
        self._engine = engine
        self._record = record
        self._mode: PauseMode = mode
        self._transport = transport
        self._version: int | None = None
        self._closing = False
        self._published: Published | None = None
        self._begun: tuple[int, asyncio.Task[Published]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts = 0
        """How often an engine was started again. Whatever was in flight there has been asked for once more since."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Nobody else publishes inside. Raises what ends the care of the engines while it waits."""
        await self.guarded(self._moving.acquire())
        try:
            yield
        finally:
            self._moving.release()

    def begin(self, version: int) -> None:
        """Let the trainer prepare `version` already. Call in a `turn`, after the step and before `publish`."""
        if self._pool.urls:
            self._begun = version, asyncio.ensure_future(self._trainer.publish(version))

    async def publish(self, version: int) -> None:
        """Make the engines serve the trainer's weights as `version`; without engines there is nobody to tell. Call in a
        `turn`. Raises `PublishError`, or what ended the care of the engines."""
        if not self._pool.urls:
            return
        self._raise_failure()
        if not self._tasks:
            self._tasks = [asyncio.ensure_future(self._follow_restarts()), asyncio.ensure_future(self._heal())]
        for left in reversed(range(_ATTEMPTS)):
            before = self.restarts
            try:
                await self.guarded(self._send(version, None))
                break
            except PublishError:
                if not left or self._pool.drained.keys() != set(self._pool.urls):
                    raise
                await self._wait_for_an_engine(before)
        self._version = version

    async def hand_over(self, version: int, fleet: EnginePool, receiver: WeightReceiver) -> VersionPublished:
        """Bring `version`, which was published last, to the engines of another fleet too. Raises `PublishError`."""
        async with self._moving:
            published = self._published
            assert published is not None, "nothing was published"
            assert published.version == version, f"version {published.version} was published last"
            return await publish(published, receiver, fleet, mode=self._mode, transport=self._transport)

    async def guarded(self, work: Awaitable[Result]) -> Result:
        """The result of `work`, which needs the engines. Raises what ends the care of them meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._raise_failure()
                going = [care for care in self._tasks if not care.done()]
                await asyncio.wait([task, *going], return_when=asyncio.FIRST_COMPLETED)
            return task.result()
        finally:
            task.cancel()

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _wait_for_an_engine(self, before: int) -> None:
        """Every engine is gone: return once one was started again, or answers. Raises when none is started again."""
        follow = self._tasks[0]
        while self.restarts == before and not any([await self._answers(url) for url in self._pool.urls]):
            if follow.done():
                follow.result()
                raise PublishError(f"every engine is gone, and none is started again: {dict(self._pool.drained)}")
            await asyncio.sleep(_POLL)

    async def close(self) -> None:
        """Stop looking after the engines."""
        self._closing = True  # Python 3.11's wait_for may swallow a cancellation
        tasks = [*self._tasks, *(self._begun[1:] if self._begun else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._receiver.close()

    async def _send(self, version: int, urls: list[str] | None) -> None:
        begun, self._begun = self._begun, None
        preparing = begun[1] if begun and begun[0] == version else self._trainer.publish(version)
        self._published = published = await preparing
        done = await publish(
            published,
            self._receiver,
            self._pool,
            mode=self._mode,
            transport=self._transport,
            transfer=lambda session: self._trainer.transfer(published, session),
            urls=urls,
        )
        self._record.log(
            "publish",
            version,
            {
                "seconds": done.seconds,
                "paused_seconds": done.paused_seconds,
                "verify_seconds": done.verify_seconds,
                "bytes": float(done.nbytes),
                "engines": float(done.engines),
            },
        )
        self._record.emit("miles_version_published", published=done)

    async def _follow_restarts(self) -> None:
        async for url in self._engine.restarts():
            self.restarts += 1
            await self._pool.drain(url, "it was started again, and holds no published version yet")

    async def _heal(self) -> None:
        while not self._closing:
            await asyncio.sleep(_PERIOD)
            back = [url for url in self._pool.drained if await self._answers(url)]
            if not back:
                continue
            async with self._moving:
                back = [url for url in back if url in self._pool.drained]
                if back and self._version is not None:
                    # A failure drains it again, with the reason, which the error of the last request tells.
                    with suppress(PublishError):
                        await self._send(self._version, back)

    async def _answers(self, url: str) -> bool:
        try:
            await self._pool.probe(url)
        except EngineError:
            return False
        return True
