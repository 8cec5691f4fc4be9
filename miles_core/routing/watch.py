"""Watching engines: one that does not answer, or does not hold the current weights, gets no traffic until it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from miles_core.errors import EngineError
from miles_core.http import JsonHttp
from miles_core.routing.table import RoutingTable

__all__ = ["EngineWatch"]


class EngineWatch:
    """Asks every engine of a table for `/server_info`, every `interval` seconds.

    An engine must answer within `deadline` seconds; the second time in a row that it does not, it is drained. It must
    hold `version`; None means the newest that any engine holds, where a version is a number and anything else is older
    than every number (SGLang's `default` of a server that was never published to). An engine that was drained for
    another reason than these two is left alone.
    """

    def __init__(
        self,
        table: RoutingTable,
        *,
        drain: Callable[[str, str], Awaitable[None]],
        version: str | None = None,
        interval: float = 2.0,
        deadline: float = 5.0,
    ) -> None:
        self.table = table
        self.version = version
        self._drain = drain
        self._interval = interval
        self._deadline = deadline
        self._http = JsonHttp(deadline=deadline)
        self._missed: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        """The reasons for which this watch drained engines."""
        self.versions: dict[str, str] = {}
        """What each engine said that it holds, when it was last asked."""

    def expect(self, url: str) -> None:
        """An engine was added: nothing goes there before it has answered."""
        self._reasons[url] = "it was not asked yet"
        self.table.engine(url).drained = self._reasons[url]

    async def look(self) -> None:
        """Ask every engine once, and drain or admit."""
        urls = [engine.url for engine in self.table.engines()]
        answers = await asyncio.gather(*(self._ask(url) for url in urls))
        present = {url: found for url, found in zip(urls, answers, strict=True) if url in self.table}
        for url, found in present.items():
            if isinstance(found, str):
                self._missed[url] = self._missed.get(url, 0) + 1
                self.versions.pop(url, None)
                if self._missed[url] > 1 or self._ours(url):
                    await self._off(url, f"it does not answer: {found}")
            else:
                self._missed.pop(url, None)
                self.versions[url] = str(found.get("weight_version", ""))
                self.table.set_ranks(url, max(1, int(found.get("dp_size") or 1)))
        newest = max(map(_age, self.versions.values()), default=-1)
        for url, held in list(self.versions.items()):
            if url not in present:
                del self.versions[url]
            elif held != self.version if self.version is not None else _age(held) < newest:
                current = self.version if self.version is not None else newest
                await self._off(url, f"it holds version {held or 'none'}, the current one is {current}")
            elif self._ours(url):
                del self._reasons[url]
                self.table.engine(url).drained = ""

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look at once, and then every `interval` seconds inside."""
        await self.look()
        task = asyncio.create_task(self._go_on())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._http.close()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def _ask(self, url: str) -> Mapping[str, Any] | str:
        """What the engine tells of itself, or why nothing."""
        try:
            found = await self._http.call("GET", f"{url}/server_info", deadline=self._deadline, once=True)
        except EngineError as error:
            return str(error)
        return found if isinstance(found, Mapping) else f"/server_info answered {str(found)[:100]}"

    def _ours(self, url: str) -> bool:
        """Whether it is drained, and by this watch."""
        reason = self.table.engine(url).drained
        return bool(reason) and reason == self._reasons.get(url)

    async def _off(self, url: str, reason: str) -> None:
        engine = self.table.engine(url)
        if self._ours(url):
            engine.drained = self._reasons[url] = reason
        elif not engine.drained:
            self._reasons[url] = reason
            await self._drain(url, reason)


def _age(version: str) -> int:
    """Numbers in their order; whatever is no number is older than all of them."""
    return int(version) if version.isdecimal() else -1
