"""Publishing for a run: the trainer's weights to all engines after a step, and to engines that come back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from miles_core.contracts.engines import Engine, PauseMode
from miles_core.contracts.transports import WeightReceiver
from miles_core.engines.pool import EnginePool
from miles_core.errors import EngineError, PublishError
from miles_core.runs.recording import Recorder
from miles_core.runs.trainer import TrainerClient
from miles_core.sync.transaction import publish

__all__ = ["Publisher"]

_PERIOD = 1.0


class Publisher:
    """Keeps the engines on the trainer's version.

    `moving` is held while the trainer's weights change, until they are published: what is published under a version
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
        self.moving = asyncio.Lock()
        self._trainer = trainer
        self._pool = pool
        self._receiver = receiver
        self._engine = engine
        self._record = record
        self._mode: PauseMode = mode
        self._transport = transport
        self._version: int | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def publish(self, version: int) -> None:
        """Make the engines serve the trainer's weights as `version`; without engines there is nobody to tell. Call with
        `moving` held. Raises `PublishError`, or what ended the care of the engines."""
        if not self._pool.urls:
            return
        for task in self._tasks:
            if task.done():
                task.result()
        await self._send(version, None)
        self._version = version
        if not self._tasks:
            self._tasks = [asyncio.ensure_future(self._follow_restarts()), asyncio.ensure_future(self._heal())]

    async def close(self) -> None:
        """Stop looking after the engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._receiver.close()

    async def _send(self, version: int, urls: list[str] | None) -> None:
        published = await self._trainer.publish(version)
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
            await self._pool.drain(url, "it was started again, and holds no published version yet")

    async def _heal(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            back = [url for url in self._pool.drained if await self._answers(url)]
            if not back:
                continue
            async with self.moving:
                back = [url for url in back if url in self._pool.drained]
                if back and self._version is not None:
                    # A failure drains it again, with the reason, which the error of the last request tells.
                    with contextlib.suppress(PublishError):
                        await self._send(self._version, back)

    async def _answers(self, url: str) -> bool:
        try:
            await self._pool.probe(url)
        except EngineError:
            return False
        return True
