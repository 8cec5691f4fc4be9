"""A pool of engines: affinity by routing key, least load for new keys, retries on another engine.

Nothing is routed to an engine that is not known to hold a verified version: one that was just started or replaced, or
that a failed publish left with unknown weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from miles_core.contracts.engines import Generation, OnTokens, PauseMode, Sampling, TokenIds
from miles_core.engines.client import EngineConnection
from miles_core.engines.wire import UnpublishedWeights
from miles_core.errors import EngineError, EngineUnavailable
from miles_core.http import JsonHttp, Retryable
from miles_core.routing.table import RoutingTable

__all__ = ["EngineAccount", "EnginePool"]

_POLL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineAccount:
    """What an engine tells of itself: `/server_info`."""

    url: str
    info: Mapping[str, Any]


class EnginePool:
    """The engines of a run, as environments see them (an `EngineClient`)."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        deadline: float = 600.0,
        routed_experts: bool = False,
        experts_per_token: int = 0,
        wait_for_weights: bool = False,
        vocabulary: int | None = None,
        control_deadline: float = 10.0,
        router: bool = False,
        on_generation: Callable[[TokenIds, Generation], None] | None = None,
    ) -> None:
        """`on_generation(input_ids, generation)` sees every finished generation as it came off the wire.

        With `wait_for_weights` no engine is routed to before a publish has admitted it. Ids from `vocabulary` on are
        refused here: they end an SGLang server. `control_deadline` seconds decide whether an engine is there at all.
        With `router` the URL is a router's, which chooses the engine.
        """
        self.http = JsonHttp(deadline=deadline)
        self._deadline = deadline
        self._control_deadline = control_deadline
        self.connections = [
            EngineConnection(
                url,
                self.http,
                routed_experts=routed_experts,
                experts_per_token=experts_per_token,
                vocabulary=vocabulary,
                router=router,
            )
            for url in urls
        ]
        self.table = RoutingTable()
        for connection in self.connections:
            self.table.add(connection.url, drained="it holds no published version yet" if wait_for_weights else "")
        self.publishing = asyncio.Lock()
        """Held by a publish."""
        self._on_generation = on_generation
        self.interruptions = 0
        """How often everything in flight was aborted on purpose, twice: odd while that is going on."""
        self.retries = 0
        """How often a request was sent again, to this engine or another."""
        self.sampled_tokens = 0

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self.connections))
        await self.http.close()

    @property
    def urls(self) -> list[str]:
        return [c.url for c in self.connections]

    @property
    def drained(self) -> Mapping[str, str]:
        """Engines that nothing is routed to, and why."""
        return self.table.drained

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests that were answered."""
        return sum(engine.prompt_tokens for engine in self.table.engines())

    @property
    def cached_tokens(self) -> int:
        """Those of them that engines had in their prefix cache."""
        return sum(engine.cached_tokens for engine in self.table.engines())

    @property
    def running(self) -> int:
        return sum(sum(engine.requests) for engine in self.table.engines())

    async def generate(
        self,
        input_ids: TokenIds,
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline
        tried: set[str] = set()
        delay = 0.05
        while True:
            route = self.table.choose(routing_key, tried, now=loop.time())
            if route is None:
                await self._wait_for_an_engine(end)
                continue
            engine = self._connection(route.url)
            self.table.started(route, len(input_ids))
            failed = False
            try:
                async with asyncio.timeout_at(end):
                    generation = await engine.generate(
                        input_ids, sampling, routing_key=routing_key, priority=priority, on_tokens=on_tokens
                    )
            except (aiohttp.ClientError, OSError, Retryable, TimeoutError) as error:
                if isinstance(error, UnpublishedWeights):
                    await self.drain(engine.url, str(error))
                failed = True
                self.retries += 1
                tried.add(engine.url)
                if loop.time() + delay >= end:
                    raise EngineUnavailable(
                        f"no engine answered within {self._deadline:.0f} s; tried {sorted(tried)}; "
                        f"last: {type(error).__name__}: {error}"
                    ) from error
                if not self.table.open(tried):
                    tried.clear()
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, 5.0)
                continue
            finally:
                self.table.finished(route, len(input_ids), failed=failed)
            if self._on_generation is not None:
                self._on_generation(input_ids, generation)
            self.table.account(
                routing_key, route, prompt_tokens=generation.prompt_tokens, cached_tokens=generation.cached_tokens
            )
            self.sampled_tokens += len(generation.token_ids)
            return generation

    async def _wait_for_an_engine(self, end: float) -> None:
        if asyncio.get_running_loop().time() + _POLL >= end:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in sorted(self.drained.items()))
            raise EngineUnavailable(f"no engine holds a verified version within {self._deadline:.0f} s: {reasons}")
        await asyncio.sleep(_POLL)

    async def probe(self, url: str) -> None:
        """Return when the engine answers; `EngineUnavailable` when it does not in some seconds."""
        await self._connection(url).server_info(deadline=self._control_deadline)

    def admit(self, url: str, version: int) -> None:
        """The engine was found to hold `version`: route to it."""
        connection = self._connection(url)
        connection.prefix_key = f"version-{version}"
        self.table.engine(connection.url).drained = ""

    async def drain(self, url: str, reason: str) -> None:
        """Route nothing to this engine before it is admitted again. Its requests in flight start over elsewhere, and
        what it still answers is not taken; it is told to stop working on them, when it can be reached."""
        connection = self._connection(url)
        self.table.engine(connection.url).drained = reason
        connection.fail(Retryable(f"{url} was drained: {reason}"))
        with contextlib.suppress(EngineError):
            await connection.abort_all(deadline=self._control_deadline)

    def _connection(self, url: str) -> EngineConnection:
        return next(c for c in self.connections if c.url == url.rstrip("/"))

    async def answering(self, *, deadline: float = 5.0) -> list[EngineAccount]:
        """What the engines that answer within `deadline` seconds tell of themselves."""
        answers = await asyncio.gather(
            *(c.server_info(deadline=deadline) for c in self.connections), return_exceptions=True
        )
        found = []
        for connection, answer in zip(self.connections, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, EngineUnavailable):
                raise answer
            if not isinstance(answer, BaseException):
                found.append(EngineAccount(url=connection.url, info=answer))
        return found

    async def flush(self, url: str) -> None:
        await self._connection(url).flush()

    def forget(self, routing_key: str) -> None:
        """A session ended: its pin is released."""
        self.table.forget(routing_key)

    async def checksums(self, url: str) -> Mapping[str, str]:
        answer = await self.http.call("POST", f"{url}/weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        if isinstance(ranks, list) and len(ranks) > 1:
            raise EngineError(
                f"{url} is served by {len(ranks)} ranks, whose shards have checksums of their own, and the trainer "
                "knows those of whole tensors; start it with --tp-size 1"
            )
        found = ranks[0] if isinstance(ranks, list) and ranks else answer
        if not isinstance(found, dict) or not isinstance(found.get("checksums"), dict):
            raise EngineError(f"{url}/weights_checker answered {str(answer)[:200]}, expected checksums by name")
        return dict(found["checksums"])

    async def interrupt(self) -> None:
        """Abort everything in flight on every engine; what is asked from then on is served."""
        with self._interrupting():
            await asyncio.gather(*(c.abort_all() for c in self.connections))

    @contextlib.contextmanager
    def _interrupting(self) -> Iterator[None]:
        self.interruptions += 1
        try:
            yield
        finally:
            self.interruptions += 1

    @contextlib.asynccontextmanager
    async def paused(
        self, mode: PauseMode, urls: Sequence[str] | None = None
    ) -> AsyncIterator[Mapping[str, Exception]]:
        """These engines (default: all) are paused inside, and go on afterwards whatever happened. One that cannot be
        paused stands in what is yielded; one that cannot go on is drained."""
        connections = self.connections if urls is None else [self._connection(url) for url in urls]
        try:
            with self._interrupting() if mode == "abort" else contextlib.nullcontext():
                results = await asyncio.gather(*(c.pause(mode) for c in connections), return_exceptions=True)
            failures = {c.url: r for c, r in zip(connections, results, strict=True) if isinstance(r, Exception)}
            yield failures
        finally:
            results = await asyncio.gather(*(c.resume() for c in connections), return_exceptions=True)
            for connection, result in zip(connections, results, strict=True):
                if isinstance(result, Exception) and connection.url not in self.drained:
                    await self.drain(connection.url, f"it could not be resumed: {result}")
