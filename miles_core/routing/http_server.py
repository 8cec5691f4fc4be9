"""Serving an application on this host, as a part of the caller's event loop."""

from __future__ import annotations

import asyncio

from miles_core.routing.client_side import Application, ClientConnection

__all__ = ["HttpServer"]

_IDLE = 75.0
"""Seconds without a byte and without a request, then a client's connection is closed."""
_BACKLOG = 2048


class HttpServer:
    """`start`, then `url`, then `close`."""

    def __init__(self, application: Application, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0 takes a free one."""
        self._application = application
        self._address = (host, port)
        self._server: asyncio.Server | None = None
        self._open: set[ClientConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self) -> str:
        """Bind and serve; the base URL. Raises `OSError` when the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, *self._address, backlog=_BACKLOG)
        self._close_idle()
        return self.url

    @property
    def url(self) -> str:
        assert self._server is not None, "the server has not been started"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def close(self, *, grace: float = 0.0) -> None:
        """Stop listening, give the requests that are on their way `grace` seconds, and end the rest. Safe to call
        twice, and before `start`."""
        if self._server is None:
            return
        self._server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.finish()
        running = [connection.task for connection in self._open if connection.task is not None]
        if grace and running:
            await asyncio.wait(running, timeout=grace)
        for connection in list(self._open):
            if connection.task is not None:
                connection.abort()
        await asyncio.sleep(0)  # what was closed is told so by the event loop's next turn

    def _connection(self) -> ClientConnection:
        return ClientConnection(self._application, self._open)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self._open):
            if connection.task is None and connection.heard < loop.time() - _IDLE:
                connection.close()
        self._sweep = loop.call_later(_IDLE / 5, self._close_idle)
