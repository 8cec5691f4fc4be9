"""A pool of engines: affinity by routing key, least load for new keys, retries on another engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import aiohttp

from miles_core.contracts.engines import Generation, OnTokens, PauseMode, Sampling
from miles_core.engines.client import EngineConnection
from miles_core.errors import EngineError, EngineUnavailable
from miles_core.http import JsonHttp, Retryable

__all__ = ["EnginePool"]


class EnginePool:
    """The engines of a run, as environments see them (an `EngineClient`)."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        deadline: float = 600.0,
        routed_experts: bool = False,
        on_generation: Callable[[Sequence[int], Generation], None] | None = None,
    ) -> None:
        """`on_generation(input_ids, generation)` sees every finished generation as it came off the wire."""
        self.http = JsonHttp(deadline=deadline)
        self._deadline = deadline
        self.connections = [EngineConnection(url, self.http, routed_experts=routed_experts) for url in urls]
        self._running = dict.fromkeys((c.url for c in self.connections), 0)
        self._pinned: dict[str, EngineConnection] = {}
        self._on_generation = on_generation
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.sampled_tokens = 0

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self.connections))
        await self.http.close()

    @property
    def urls(self) -> list[str]:
        return [c.url for c in self.connections]

    @property
    def running(self) -> int:
        return sum(self._running.values())

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_queued: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline
        tried: set[str] = set()
        delay = 0.05
        while True:
            engine = self._choose(routing_key, tried)
            self._running[engine.url] += 1
            try:
                async with asyncio.timeout_at(end):
                    generation = await engine.generate(
                        input_ids, sampling, priority=priority, on_queued=on_queued, on_tokens=on_tokens
                    )
            except (aiohttp.ClientError, OSError, Retryable, TimeoutError) as error:
                tried.add(engine.url)
                self._pinned.pop(routing_key, None)
                if loop.time() + delay >= end:
                    raise EngineUnavailable(
                        f"no engine answered within {self._deadline:.0f} s; tried {sorted(tried)}; "
                        f"last: {type(error).__name__}: {error}"
                    ) from error
                if len(tried) == len(self.connections):
                    tried.clear()
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, 5.0)
                continue
            finally:
                self._running[engine.url] -= 1
            if self._on_generation is not None:
                self._on_generation(input_ids, generation)
            self.prompt_tokens += generation.prompt_tokens
            self.cached_tokens += generation.cached_tokens
            self.sampled_tokens += len(generation.token_ids)
            return generation

    def _choose(self, routing_key: str, tried: set[str]) -> EngineConnection:
        pinned = self._pinned.get(routing_key)
        if pinned is not None and pinned.url not in tried:
            return pinned
        candidates = [c for c in self.connections if c.url not in tried] or self.connections
        engine = min(candidates, key=lambda c: self._running[c.url])
        if routing_key:
            self._pinned[routing_key] = engine
        return engine

    def forget(self, routing_key: str) -> None:
        """A session ended: its pin is released."""
        self._pinned.pop(routing_key, None)

    async def checksums(self, url: str) -> Mapping[str, str]:
        answer = await self.http.call("POST", f"{url}/weights_checker", {"action": "checksum"}, deadline=300.0)
        if not isinstance(answer, dict) or not isinstance(answer.get("checksums"), dict):
            raise EngineError(f"{url}/weights_checker answered {str(answer)[:200]}, expected checksums by name")
        return dict(answer["checksums"])

    @contextlib.asynccontextmanager
    async def paused(self, mode: PauseMode) -> AsyncIterator[None]:
        """All engines are paused inside, and go on afterwards whatever happened."""
        paused: list[EngineConnection] = []
        try:
            for connection in self.connections:
                paused.append(connection)
                await connection.pause(mode)
            yield
        finally:
            results = await asyncio.gather(*(c.resume() for c in paused), return_exceptions=True)
            failures = [r for r in results if isinstance(r, BaseException)]
            if failures:
                raise failures[0]
