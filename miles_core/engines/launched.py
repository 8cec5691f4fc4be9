"""Servers that a run launched: one that ends is started again, under its URL, a limited number of times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from miles_core.contracts.engines import EngineStart
from miles_core.contracts.launchers import Launcher, Process, ProcessSpec
from miles_core.errors import EnvironmentFailure

__all__ = ["LaunchedServer", "LaunchedServers"]

_POLL = 0.1
_GRACE = 15.0
"""Seconds that a server has to end by itself."""


class LaunchedServer:
    """One server process. `spec(self)` says how it is launched, and launched again; its ready line names its `url`, and
    a spec that is asked for once more keeps the port of that."""

    def __init__(
        self,
        launcher: Launcher[Any],
        start: EngineStart,
        index: int,
        spec: Callable[[LaunchedServer], ProcessSpec],
    ) -> None:
        self._launcher = launcher
        self._spec = spec
        self.process: Process | None = None
        self.name = f"engine-{index}"
        self.log: Path = start.run_directory / "logs" / f"{self.name}.log"
        self.url = ""

    @property
    def port(self) -> int:
        """Of its URL; 0 before it was launched."""
        return int(self.url.rpartition(":")[2] or 0)

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    async def launch(self) -> None:
        """Raises `EnvironmentFailure` with the end of the server's log."""
        self.process = await self._launcher.launch(self._spec(self))
        self.url = str(self.process.ready["url"])

    async def stop(self) -> None:
        if self.process is not None:
            await self.process.stop(grace=_GRACE)


class LaunchedServers:
    """The servers of one engine component; `what` they are called in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stopping = False
        self.servers: list[LaunchedServer] = []

    async def launch(self, servers: Sequence[LaunchedServer]) -> list[str]:
        """Launch all of them; their URLs. When one fails, those that were launched are stopped."""
        self._stopping = False
        self.servers = list(servers)
        try:
            async with asyncio.TaskGroup() as group:
                for server in servers:
                    group.create_task(server.launch())
        except BaseExceptionGroup as failures:
            await self.stop()
            raise failures.exceptions[0] from None
        return [server.url for server in servers]

    async def stop(self) -> None:
        self._stopping = True
        while self.servers:
            await self.servers.pop().stop()

    async def restarts(self, allowed: int) -> AsyncIterator[str]:
        """See `Engine.restarts`. Raises `EnvironmentFailure` when a server may not, or cannot, be started again."""
        left = allowed
        while self.servers and not self._stopping:
            await asyncio.sleep(_POLL)
            for server in list(self.servers):
                if server.alive() or self._stopping:
                    continue
                if not left:
                    raise EnvironmentFailure(
                        f"the {self._what} at {server.url} ended, and engine.restarts = {allowed} allows no further "
                        f"start; its log is {server.log}. Continue with `miles resume`."
                    )
                left -= 1
                await server.launch()
                yield server.url
