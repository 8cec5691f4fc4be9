"""The router's connections from clients: one HTTP/1.1 protocol each, requests answered in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

import httptools

from miles_core.routing.wire import Request, answer

__all__ = ["ClientConnection", "Handler"]

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MOST_WAITING = 64
"""Pipelined requests that are read ahead of their turn."""


class ClientConnection(asyncio.Protocol):
    """Reads requests, gives each to `handler(request, connection)`, and writes what that sends. A client that goes away
    cancels its request."""

    def __init__(self, handler: Handler, *, max_body: int, open_in: set[ClientConnection]) -> None:
        """`open_in` holds it as long as it is open."""
        self._open_in = open_in
        self._handler = handler
        self._max_body = max_body
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self.on_pause: Callable[[bool], None] | None = None
        """Told when the client takes no more for now (True), and when it takes again."""
        self._new()

    def _new(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._size = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._open_in.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.refuse(400, "this router upgrades no connection", "no_upgrade")
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self.refuse(400, f"the request is no HTTP/1.1: {error}", "bad_request")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._open_in.discard(self)
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        if self.on_pause is not None:
            self.on_pause(True)

    def resume_writing(self) -> None:
        if self.on_pause is not None:
            self.on_pause(False)

    # httptools

    def on_message_begin(self) -> None:
        self._new()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        length = next((value for name, value in self._headers if name == b"content-length"), b"0")
        if int(length) > self._max_body:
            self._too_large()
        elif any(name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers):
            self.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_body:
            self._too_large()
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        request = Request(
            method=self._parser.get_method(),
            target=self._target,
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            keep_alive=bool(self._parser.should_keep_alive()),
            version=self._parser.get_http_version(),
        )
        if self._task is None:
            self._start(request)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(request)
        else:
            self.refuse(400, f"more than {_MOST_WAITING} requests wait on this connection", "too_many_requests")

    # What handlers call

    def write(self, data: bytes) -> None:
        """Send bytes; those to a client that has gone are dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close when what was written is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End an answer that cannot be finished: the client sees a connection that broke, never a shorter answer."""
        if self._transport is not None:
            self._transport.abort()

    def refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error, and close: what follows on this connection was not read."""
        self.write(answer(status, {"error": {"message": message, "code": code}}, close=True))
        self.close()

    def _too_large(self) -> None:
        self.refuse(413, f"the body has more than {self._max_body} bytes", "request_too_large")

    def _start(self, request: Request) -> None:
        self._task = asyncio.get_running_loop().create_task(self._handle(request))

    async def _handle(self, request: Request) -> None:
        try:
            await self._handler(request, self)
        finally:
            self._task = None
            self.on_pause = None
            if not request.keep_alive:
                self.close()
            elif self._waiting and self._transport is not None:
                self._start(self._waiting.popleft())


Handler = Callable[[Request, ClientConnection], Awaitable[None]]
