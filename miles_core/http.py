"""JSON over HTTP to an engine: deadlines, retries, and errors that say which engine said what.

aiohttp is imported when the first connection opens: checking a config, which loads every component, needs none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from miles_core.errors import EngineError, EngineRefusal, EngineUnavailable

if TYPE_CHECKING:
    import aiohttp

__all__ = ["JsonHttp", "Retryable", "check_status"]

_RETRIED = frozenset({502, 503, 504})


class JsonHttp:
    """A shared connection pool. Retries transport errors and 502 to 504 with full-jitter backoff until `deadline`
    seconds have passed; a 4xx is never retried."""

    def __init__(self, *, deadline: float = 600.0) -> None:
        self._deadline = deadline
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._closed:
            raise EngineError("the connection pool is closed: nothing may be asked of an engine any more")
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=75)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
            )
        return self._session

    async def close(self) -> None:
        """Close all connections, for good."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def session(self) -> aiohttp.ClientSession:
        return await self._open()

    async def call(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
        once: bool = False,
    ) -> Any:
        """The decoded answer. With `once` nothing is sent a second time: for what must not happen twice. Raises
        `EngineRefusal` on 4xx, `EngineUnavailable` when the deadline passes (with `once`: when there is no answer),
        `EngineError` on a 500 or an answer that is not JSON."""
        import aiohttp

        limit = self._deadline if deadline is None else deadline
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        delay = 0.05
        while True:
            try:
                return await asyncio.wait_for(self._once(method, url, body), max(0.0, end - loop.time()))
            except (aiohttp.ClientError, OSError, Retryable, TimeoutError) as error:
                last = error
            pause = random.uniform(0, delay)
            delay = min(delay * 2, 5.0)
            if once or loop.time() + pause >= end:
                raise EngineUnavailable(
                    f"{method} {url}: no answer within {limit:.1f} s; last: {type(last).__name__}: {last}"
                ) from last
            await asyncio.sleep(pause)

    async def _once(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        session = await self._open()
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with session.request(method, url, data=data, headers=headers) as response:
            payload = await response.read()
            check_status(f"{method} {url}", response.status, payload)
        if not payload:
            return None
        try:
            return orjson.loads(payload)
        except orjson.JSONDecodeError:
            return payload.decode(errors="replace")


class Retryable(Exception):
    """An answer that may be different next time."""


def check_status(what: str, status: int, payload: bytes) -> None:
    """Turn a status of 400 and above into the error it means."""
    if status < 400:
        return
    text = payload.decode(errors="replace")[:2000]
    if status < 500:
        raise EngineRefusal(f"{what}: {status}: {text}")
    if status in _RETRIED:
        raise Retryable(f"{status}: {text}")
    raise EngineError(f"{what}: {status}: {text}")
