"""Admission: how a synchronous step makes its samples independent of timing.

Requests posted while the engines are held queue up; each episode's client says when its first request stands in
the queue, and carries the episode's place in submission order as the request's priority.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from miles_core.contracts.engines import Generation, OnTokens, PauseMode, Sampling

__all__ = ["AdmissionClient", "EngineHold", "QueuingEngine"]


class QueuingEngine(Protocol):
    """The engines of a run as the producer needs them."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_queued: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generation: ...

    def paused(self, mode: PauseMode) -> AbstractAsyncContextManager[None]: ...

    def forget(self, routing_key: str) -> None: ...


class EngineHold:
    """The engines, and the means to hold them."""

    def __init__(self, engine: QueuingEngine) -> None:
        self.engine = engine

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Inside, requests queue and nothing runs; what ran goes on afterwards with its cache intact."""
        async with self.engine.paused("in_place"):
            yield


class AdmissionClient:
    """One episode's engine client. `queued` is set once its first request stands in an engine's queue."""

    def __init__(self, engine: QueuingEngine, *, priority: int) -> None:
        self._engine = engine
        self._priority = priority
        self.queued = asyncio.Event()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """As `EngineClient.generate`; the episode's own place in submission order is the priority."""
        return await self._engine.generate(
            input_ids,
            sampling,
            routing_key=routing_key,
            priority=self._priority + priority,
            on_queued=self.queued.set,
            **({} if on_tokens is None else {"on_tokens": on_tokens}),
        )
