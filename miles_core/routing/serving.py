"""Serving a router: its socket, its watch over the engines, and the paths under `/router` that steer it."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from miles_core.routing.client_side import ClientConnection
from miles_core.routing.http_server import HttpServer
from miles_core.routing.router import Router, RouterSettings, error_body
from miles_core.routing.table import EngineLoad, RoutingTable
from miles_core.routing.watch import EngineWatch
from miles_core.routing.wire import Request

__all__ = ["RouterServer"]

_SWEEP = 5.0


class RouterServer:
    """A router on this host, as a part of the caller's event loop: `start`, then `url`, then `close`.

    | path | |
    |---|---|
    | `GET /router/engines` | engines: load, hit rate, why drained |
    | `POST /router/engines` `{"url"}` | add one; it gets traffic when it has answered and holds the current version |
    | `DELETE /router/engines?url=` | remove one; its sessions move |
    | `PUT /router/version` `{"weight_version"}` | what engines must hold; null for the newest that any of them holds |
    | `GET /router/sessions?key=` | where a session is, how often it moved, its hit rate |

    With `admin_token` these need it in `Authorization: Bearer`.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        settings: RouterSettings | None = None,
        version: str | None = None,
        admin_token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        watch_interval: float = 2.0,
        watch_deadline: float = 5.0,
    ) -> None:
        self.settings = settings or RouterSettings()
        self.table = RoutingTable()
        self.router = Router(self.table, self.settings)
        self.watch = EngineWatch(
            self.table, drain=self.router.drain, version=version, interval=watch_interval, deadline=watch_deadline
        )
        for url in engines:
            self._add(url)
        self._admin_token = admin_token
        self._stack = AsyncExitStack()
        self._server = HttpServer(self, host=host, port=port)

    async def start(self) -> str:
        """Ask the engines, bind and serve; the base URL. Raises `OSError` when the address cannot be had."""
        await self._stack.enter_async_context(self.watch.watching())
        await self._server.start()
        sweep = asyncio.create_task(self._sweep())
        self._stack.callback(sweep.cancel)
        return self.url

    @property
    def url(self) -> str:
        return self._server.url

    async def close(self) -> None:
        """Stop: connections are closed, whatever is on its way."""
        await self._server.close()
        await self._stack.aclose()
        self.router.close()

    # The application that is served: see `Application`.

    @property
    def max_body(self) -> int:
        return self.settings.max_body

    async def __call__(self, request: Request, client: ClientConnection) -> None:
        if request.target.startswith(b"/router/"):
            status, body = await self._steer(request)
            client.answer(status, body)
        else:
            await self.router.handle(request, client)

    def refusal(self, request: Request, status: int, message: str, code: str) -> object:
        return error_body(message, code)

    async def _steer(self, request: Request) -> tuple[int, Any]:
        """Status and body of a request under `/router`."""
        if self._admin_token is not None:
            scheme, _, given = request.header(b"authorization").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode(), self._admin_token.encode()
            ):
                return _refusal(401, "the router's admin token is needed, in Authorization: Bearer")
        target = urlsplit(request.target.decode("latin-1"))
        query = {name: values[-1] for name, values in parse_qs(target.query).items()}
        try:
            body = orjson.loads(request.body or b"{}")
            if not isinstance(body, dict):
                raise ValueError("the body is no JSON object")
            match request.method, target.path:
                case b"GET", "/router/engines":
                    return 200, {"engines": [_state(e, self.watch) for e in self.table.engines()], **self._totals()}
                case b"POST", "/router/engines":
                    url = self._add(str(body.get("url", "")))
                    await self.watch.look()
                    return 201, _state(self.table.engine(url), self.watch)
                case b"DELETE", "/router/engines":
                    await self.router.remove(query.get("url", "").rstrip("/"))
                    return 200, {"removed": query["url"]}
                case b"PUT", "/router/version":
                    version = body.get("weight_version")
                    self.watch.version = None if version is None else str(version)
                    await self.watch.look()
                    return 200, {"weight_version": self.watch.version}
                case b"GET", "/router/sessions":
                    return self._session(query.get("key", ""))
        except KeyError as error:
            return _refusal(404, f"no engine {error}; GET /router/engines lists them")
        except ValueError as error:
            return _refusal(400, str(error))
        return _refusal(404, f"no {request.method.decode()} {target.path}")

    def _add(self, url: str) -> str:
        """Raises `ValueError` for what is no URL, or is there already."""
        url = url.rstrip("/")
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path:
            raise ValueError(f"engine {url!r}: expected http://HOST:PORT")
        self.table.add(url)
        self.watch.expect(url)
        return url

    def _totals(self) -> dict[str, Any]:
        return {"retries": self.router.retries, "sessions": sum(1 for _ in self.table.pins())}

    def _session(self, key: str) -> tuple[int, Any]:
        pin = self.table.pin(key)
        if pin is None:
            return _refusal(404, f"no session {key!r}: it asked for nothing yet, or was idle too long")
        return 200, {
            "key": key,
            "engine": pin.route.url,
            "rank": pin.route.rank,
            "moves": pin.moves,
            "prompt_tokens": pin.prompt_tokens,
            "cached_tokens": pin.cached_tokens,
            "hit_rate": pin.cached_tokens / pin.prompt_tokens if pin.prompt_tokens else 0.0,
        }

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            self.router.expire()


def _state(engine: EngineLoad, watch: EngineWatch) -> dict[str, Any]:
    return {
        "url": engine.url,
        "serving": not engine.drained,
        "drained": engine.drained or None,
        "weight_version": watch.versions.get(engine.url),
        "ranks": engine.ranks,
        "running": sum(engine.requests),
        "running_tokens": sum(engine.tokens),
        "served": engine.served,
        "failed": engine.failed,
        "prompt_tokens": engine.prompt_tokens,
        "cached_tokens": engine.cached_tokens,
        "hit_rate": engine.hit_rate,
    }


def _refusal(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message}}
