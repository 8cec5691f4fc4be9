"""The stand-alone router: sessions to engines, over HTTP, bodies handed through.

A request names its session in `X-SMG-Routing-Key` (SGLang's name for it) or `X-Session-ID`, how long it may take in
`X-Request-Timeout` (seconds), and with `Idempotency-Key` which generation it is: the same key again, while the first
is on its way, is answered 409. A request is sent again only where no answer had begun: after a broken connection or a
503. Weights are published to engines, never through a router, so it forwards no path that changes an engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from miles_core.routing.client_side import ClientConnection
from miles_core.routing.connections import Connections
from miles_core.routing.table import Route, RoutingTable
from miles_core.routing.wire import Exchange, Request

__all__ = ["GENERATING", "Router", "RouterSettings", "error_body"]

GENERATING = frozenset(
    (
        b"/generate",
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/messages/count_tokens",
        b"/v1/embeddings",
        b"/inference/v1/generate",
    )
)
"""Paths whose requests go to the engine of their session."""

_READING = frozenset((b"/v1/models", b"/model_info", b"/get_model_info", b"/server_info", b"/get_server_info"))
"""Paths that any engine can answer."""

_COUNTS = re.compile(rb'"(prompt_tokens|cached_tokens)"\s*:\s*(\d+)')
_LONGEST_COUNT = 64
_BYTES_PER_TOKEN = 5
"""Of a JSON list of ids, about; of text too. What a request weighs is compared with other requests alone."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """`deadline`: most seconds of a request. `session_ttl`: seconds after which an idle session is forgotten."""

    deadline: float = 600.0
    session_ttl: float = 3600.0
    max_body: int = 64 << 20
    connect_timeout: float = 5.0


class _Answer:
    """An answer on its way from an engine to a client. A 503 is withheld while another engine can be asked."""

    def __init__(self, client: ClientConnection, *, withhold: Collection[int]) -> None:
        self._client = client
        self._withhold = withhold
        self.status = 0
        self.begun = False
        self.counts: dict[bytes, int] = {}
        self._tail = b""

    def begin(self, status: int) -> bool:
        self.status = status
        self.begun = status not in self._withhold
        return self.begun

    def take(self, data: bytes) -> None:
        self._client.write(data)
        for name, count in _COUNTS.findall(self._tail + data):
            self.counts[name] = int(count)
        self._tail = data[-_LONGEST_COUNT:]


class Router:
    """Forwards requests to the engines of a table. `handle` is given to each `ClientConnection`."""

    def __init__(self, table: RoutingTable, settings: RouterSettings) -> None:
        self.table = table
        self.settings = settings
        self.retries = 0
        self._connections = Connections(connect_timeout=settings.connect_timeout)
        self._keys: set[str] = set()

    async def handle(self, request: Request, client: ClientConnection) -> None:
        """Answer one request."""
        path = request.target.partition(b"?")[0]
        if request.version != "1.1":
            message = f"HTTP/{request.version}; this router speaks HTTP/1.1"
            client.answer(505, error_body(message, "http_version"), close=True)
        elif request.method == b"POST" and path in GENERATING:
            await self._once(request, client)
        elif request.method == b"GET" and path in _READING:
            await self._forward(request, client)
        elif request.method == b"POST" and path == b"/abort_request":
            await self._everywhere(request, client)
        elif request.method == b"GET" and path == b"/health":
            serving = len(self.table.open())
            state = {"status": "ok" if serving else "no engine serves", "engines": serving}
            client.answer(200 if serving else 503, state)
        else:
            message = f"no {request.method.decode()} {path.decode('latin-1')} through a router; ask the engine itself"
            client.answer(404, error_body(message, "not_found"))

    async def _once(self, request: Request, client: ClientConnection) -> None:
        key = request.header(b"idempotency-key")
        if not key:
            await self._forward(request, client)
            return
        if key in self._keys:
            message = f"the request with Idempotency-Key {key!r} is still on its way; wait for its answer"
            client.answer(409, error_body(message, "request_in_flight"))
            return
        self._keys.add(key)
        try:
            await self._forward(request, client)
        finally:
            self._keys.discard(key)

    async def _forward(self, request: Request, client: ClientConnection) -> None:
        """Ask one engine after the other until one answers or time is over."""
        loop = asyncio.get_running_loop()
        limit = self._limit(request)
        if limit is None:
            given = request.header(b"x-request-timeout")
            message = f"X-Request-Timeout: {given!r}; give a number of seconds above 0, or leave it out"
            client.answer(400, error_body(message, "bad_timeout"))
            return
        end = loop.time() + limit
        key = request.header(b"x-smg-routing-key") or request.header(b"x-session-id")
        tried: set[str] = set()
        delay, last = 0.05, "every engine is drained"
        while True:
            route = self.table.choose(key, tried, now=loop.time())
            if route is not None:
                found = _Answer(client, withhold=(503,))
                failure = await self._ask(route, key, request, client, found, end)
                if failure is None:
                    return
                if found.begun:
                    client.abort()
                    return
                last = f"{route.url}: {failure}"
                tried.add(route.url)
                self.retries += 1
            if loop.time() + delay >= end:
                what = f"no answer within {limit:g} s; {last}"
                client.answer(504 if route is not None else 503, error_body(what, "engine_unavailable"))
                return
            if not self.table.open(tried):
                tried.clear()
                await asyncio.sleep(delay)
                delay = min(2 * delay, 2.0)

    def _limit(self, request: Request) -> float | None:
        """Seconds that the request may take; None when it asks for what is no such number."""
        given = request.header(b"x-request-timeout")
        try:
            asked = float(given) if given else self.settings.deadline
        except ValueError:
            return None
        return min(asked, self.settings.deadline) if asked > 0 else None

    async def _ask(
        self, route: Route, key: str, request: Request, client: ClientConnection, found: _Answer, end: float
    ) -> str | None:
        """Send the request there and hand on its answer; why there was none, or none that counts."""
        weight = len(request.body) // _BYTES_PER_TOKEN
        self.table.started(route, weight)
        failure: str | None = None
        try:
            async with asyncio.timeout_at(end):
                await self._exchange(route, request, client, found)
            if found.status == 503:
                failure = "503"
        except OSError as error:
            failure = str(error) or type(error).__name__
        except TimeoutError:
            failure = "it took too long"
        finally:
            client.on_pause = None
            self.table.finished(route, weight, failed=failure is not None)
        if found.counts:
            prompt, cached = found.counts.get(b"prompt_tokens", 0), found.counts.get(b"cached_tokens", 0)
            self.table.account(key, route, prompt_tokens=prompt, cached_tokens=cached)
        return failure

    async def _exchange(self, route: Route, request: Request, client: ClientConnection, found: _Answer) -> None:
        """One attempt. The client's connection ends with the engine's, where the engine's answer says so or has no
        length."""

        def use(connection: Exchange) -> None:
            client.on_pause = connection.pause

        again = await self._connections.send(route.url, request, self._body(route, request), found, on_connection=use)
        if not again and found.begun:
            client.close()

    def _body(self, route: Route, request: Request) -> bytes:
        """The request's own, with the rank of its session where an engine has several (SGLang's `routed_dp_rank`); one
        that the client names stays: the last of two equal keys counts."""
        if self.table.engine(route.url).ranks == 1 or not request.body.lstrip().startswith(b"{"):
            return request.body
        inside = request.body.lstrip()[1:].lstrip()
        comma = b"" if inside.startswith(b"}") else b","
        return b'{"routed_dp_rank":%d%s' % (route.rank, comma) + inside

    async def _everywhere(self, request: Request, client: ClientConnection) -> None:
        """An abort goes to every engine: which of them runs the request is in its body, or was before a retry."""

        async def tell(url: str) -> Any:
            quiet = _Answer(client, withhold=range(600))
            async with asyncio.timeout(self.settings.connect_timeout):
                await self._exchange(Route(url), request, client, quiet)
            return quiet.status

        urls = [engine.url for engine in self.table.engines()]
        found = await asyncio.gather(*(tell(url) for url in urls), return_exceptions=True)
        told: Mapping[str, Any] = {
            url: result if isinstance(result, int) else str(result) for url, result in zip(urls, found, strict=True)
        }
        client.answer(200, {"success": True, "engines": told})

    async def drain(self, url: str, reason: str) -> None:
        """Route nothing there any more. What is on its way and unanswered starts over elsewhere."""
        self.table.engine(url).drained = reason
        self._connections.end(url, f"the engine was drained: {reason}")

    async def remove(self, url: str) -> None:
        """As `drain`, for good. Raises `KeyError` for an unknown engine."""
        await self.drain(url, "it was removed")
        self.table.remove(url)

    def expire(self) -> int:
        """Forget the sessions that were idle too long; how many."""
        return self.table.expire(asyncio.get_running_loop().time() - self.settings.session_ttl)

    def close(self) -> None:
        self._connections.close()


def error_body(message: str, code: str) -> Mapping[str, Any]:
    """The JSON of an answer that is an error of the router's own."""
    return {"error": {"message": message, "code": code}}
