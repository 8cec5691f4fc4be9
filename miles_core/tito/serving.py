"""Serving a session application on this host, as a task of the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from miles_core.garbage import Freezer
from miles_core.tito.server import SessionApp

__all__ = ["SessionServer"]

_TICKS = 5
"""Garbage collections between two sweeps."""


class _Server(uvicorn.Server):
    """Leaves signals to the process that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SessionServer:
    """A running session server: `start`, then `url`, then `close`. Expired sessions are ended every few seconds.

    In between the garbage collector of the whole process is in the hands of a `Freezer`."""

    def __init__(self, app: SessionApp, *, host: str = "127.0.0.1", port: int = 0, sweep_seconds: float = 5.0) -> None:
        self.app = app
        self._address = (host, port)
        self._sweep_seconds = sweep_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._socket: socket.socket | None = None

    async def start(self) -> str:
        """Bind and serve; the base URL. Port 0 takes a free one. Raises `OSError` when the address cannot be had."""
        self._socket = socket.create_server(self._address, backlog=2048)
        config = uvicorn.Config(
            self.app,
            lifespan="off",
            log_level=logging.WARNING,
            access_log=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        self._server = _Server(config)
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[self._socket])),
            asyncio.create_task(self._sweep()),
        ]
        while not self._server.started:
            if self._tasks[0].done():
                await self._tasks[0]
            await asyncio.sleep(0.005)
        return self.url

    @property
    def url(self) -> str:
        assert self._socket is not None, "the server has not been started"
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def close(self) -> None:
        """End every session and stop. Safe to call twice, and before `start`."""
        self.app.store.close()
        if not self._tasks:
            return
        serving, sweeping = self._tasks
        self._tasks = []
        sweeping.cancel()
        self._server.should_exit = True
        for result in await asyncio.gather(serving, sweeping, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _sweep(self) -> None:
        freezer = Freezer()
        try:
            while True:
                for _ in range(_TICKS):
                    await asyncio.sleep(self._sweep_seconds / _TICKS)
                    freezer.tick(idle=not self.app.store.running)
                self.app.store.expire()
        finally:
            freezer.close()
