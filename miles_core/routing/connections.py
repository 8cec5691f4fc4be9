"""Kept-alive connections to engines, for the router and for the engine client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from miles_core.routing.wire import BrokenAnswerError, EndedError, Exchange, Receiver, Request, request_head

__all__ = ["Connections"]


class Connections:
    """Connections by engine URL (`http://HOST:PORT`, or https). Not more of them than requests that run at once."""

    def __init__(self, kind: Callable[[], Exchange] = Exchange, *, connect_timeout: float = 5.0) -> None:
        """`kind` makes what talks over one: an `Exchange`, or a `BodyExchange` for who wants the answers' bodies."""
        self._kind = kind
        self._connect_timeout = connect_timeout
        self._idle: dict[str, list[Exchange]] = {}
        self._running: dict[str, set[Exchange]] = {}

    async def send(
        self,
        url: str,
        request: Request,
        body: bytes,
        receiver: Receiver,
        *,
        on_connection: Callable[[Exchange], None] | None = None,
    ) -> bool:
        """Send `request` with `body` in the place of its own and hand the answer to `receiver`; False when the
        connection ended with it. An idle connection that the engine had closed is replaced by another. Cancelling it
        closes the connection, which tells the engine to stop. Raises `BrokenAnswerError` and `OSError`."""
        head = request_head(request, urlsplit(url).netloc.encode(), len(body))
        while True:
            idle = self._idle.get(url)
            reused = bool(idle)
            connection = idle.pop() if idle else await self._connect(url)
            if not connection.usable:
                continue
            if on_connection is not None:
                on_connection(connection)
            running = self._running.setdefault(url, set())
            running.add(connection)
            try:
                again = await connection.send(head, body, receiver)
            except EndedError:
                raise
            except BrokenAnswerError:
                if reused and not connection.answered:
                    continue
                raise
            finally:
                running.discard(connection)
            if again:
                self._idle.setdefault(url, []).append(connection)
            else:
                connection.abort()
            return again

    def end(self, url: str, reason: str) -> None:
        """End what is on its way to this engine with `EndedError`, and close what is idle."""
        for connection in list(self._running.get(url, ())):
            connection.fail(EndedError(reason))
        for connection in self._idle.pop(url, ()):
            connection.abort()

    def close(self) -> None:
        """Close what is idle, and what is on its way."""
        for url in {*self._idle, *self._running}:
            self.end(url, "the client was closed")

    async def _connect(self, url: str) -> Exchange:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        options: dict[str, Any] = {"ssl": ssl.create_default_context()} if secure else {}
        port = parts.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout):
            _, exchange = await loop.create_connection(self._kind, parts.hostname or "", port, **options)
        return exchange
