"""Serving a session application on this host, as a task of the caller's event loop."""

from __future__ import annotations

import asyncio

from miles_core.garbage import Freezer
from miles_core.routing.http_server import HttpServer
from miles_core.tito.server import SessionApp

__all__ = ["SessionServer"]

_TICKS = 5
"""Garbage collections between two sweeps."""
_GRACE = 1.0
"""Seconds in which clients are told that their sessions have ended."""


class SessionServer:
    """A running session server: `start`, then `url`, then `close`. Expired sessions are ended every few seconds.

    In between the garbage collector of the whole process is in the hands of a `Freezer`."""

    def __init__(self, app: SessionApp, *, host: str = "127.0.0.1", port: int = 0, sweep_seconds: float = 5.0) -> None:
        self.app = app
        self._server = HttpServer(app, host=host, port=port)
        self._sweep_seconds = sweep_seconds
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and serve; the base URL. Port 0 takes a free one. Raises `OSError` when the address cannot be had."""
        await self._server.start()
        self._sweeping = asyncio.create_task(self._sweep())
        return self.url

    @property
    def url(self) -> str:
        return self._server.url

    async def close(self) -> None:
        """End every session and stop. Safe to call twice, and before `start`."""
        self.app.store.close()
        await self._server.close(grace=_GRACE)
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
            self._sweeping = None

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
