"""Connections from clients, of the router and of the session server: HTTP/1.1, requests answered in order.

A request is read whole before its application sees it. What cannot be read is refused by the connection itself, in the
application's words; the rest of such a connection is dropped unread.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools
import orjson

from miles_core.routing.wire import Request

__all__ = ["Application", "ClientConnection"]

_LOG = logging.getLogger(__name__)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JSON = b"application/json"
_MOST_WAITING = 64
"""Pipelined requests that are read ahead of their turn."""
_MOST_HEAD = 64 << 10
"""Bytes of a request's line and headers, about."""
_LINGER = 2.0
"""Seconds for a client to read why it was refused: closed at once, what it still sends would reset its connection."""
_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class Application(Protocol):
    """What is served."""

    @property
    def max_body(self) -> int:
        """Bytes; a request with more is refused with 413."""
        ...

    async def __call__(self, request: Request, client: ClientConnection) -> None:
        """Answer one request, by what `client` offers. Cancelled when the client goes away. What it raises is a 500, or
        the end of an answer that had begun."""
        ...

    def refusal(self, request: Request, status: int, message: str, code: str) -> object:
        """JSON of the answer to a request that could not be read, of which `request` is what there was."""
        ...


class ClientConnection(asyncio.Protocol):
    """One client. An application answers by `answer`; by `begin`, `piece` and `end`; or writes the bytes of an answer
    itself."""

    def __init__(self, application: Application, open_in: set[ClientConnection]) -> None:
        """`open_in` holds it as long as it is open."""
        self._application = application
        self._open_in = open_in
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Request] = deque()
        self._refusal = b""
        self._head_bytes = 0
        self._in_head = False
        self._new()
        self._request: Request | None = None
        self._closing = False
        self._begun = False
        self.task: asyncio.Task[None] | None = None
        """Answers the request whose turn it is."""
        self.status = 0
        """Of the answer that `answer` or `begin` began; 0 before that."""
        self.paused = False
        """Whether the client takes no more for now."""
        self.on_pause: Callable[[bool], None] | None = None
        """Told when `paused` changes."""
        self.heard = 0.0
        """When something came from the client, or an answer to it was finished: a time of the event loop's clock."""

    def _new(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._size = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._open_in.add(self)
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        if self._refusal:
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # to HTTP/2, which a server is free to ignore
            self._parser = httptools.HttpRequestParser(self)
            rest = data[upgrade.args[0] :]
            if rest:
                self.data_received(rest)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._refuse(400, f"the request is no HTTP/1.1: {error}", "bad_request")
        if self._in_head and self._head_bytes > _MOST_HEAD:
            self._refuse(431, f"the headers have more than {_MOST_HEAD} bytes", "headers_too_large")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._open_in.discard(self)
        self._waiting.clear()
        del self._parser  # it holds this connection
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._set_paused(True)

    def resume_writing(self) -> None:
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        if self.on_pause is not None:
            self.on_pause(paused)

    # httptools

    def on_message_begin(self) -> None:
        self._new()
        self._in_head, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        length, expected = b"0", b""
        for name, value in self._headers:
            if name == b"content-length":
                length = value
            elif name == b"expect":
                expected = value.lower()
        if int(length) > self._application.max_body:
            self._refuse_large()
        elif expected == b"100-continue" and self.task is None:
            self.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._application.max_body:
            self._body = []
            self._refuse_large()
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._refusal:
            return
        request = self._read(self._body[0] if len(self._body) == 1 else b"".join(self._body))
        if self._parser.should_upgrade() and request.header(b"upgrade").lower() == "websocket":
            self._refuse(400, "this server upgrades no connection", "no_upgrade")
        elif self.task is None:
            self._start(request)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(request)
        else:
            message = f"more than {_MOST_WAITING} requests wait on this connection; wait for answers, or open another"
            self._refuse(429, message, "too_many_requests")

    def _read(self, body: bytes) -> Request:
        return Request(
            method=self._parser.get_method(),
            target=self._target,
            headers=self._headers,
            body=body,
            keep_alive=bool(self._parser.should_keep_alive()),
            version=self._parser.get_http_version(),
        )

    # What applications call

    def answer(self, status: int, body: object, *, content_type: bytes = _JSON, close: bool = False) -> None:
        """Answer whole: with bytes as they are, with anything else as JSON. `close` ends the connection behind it."""
        assert self._request is not None
        self.status = status
        self._closing |= close or not self._request.keep_alive
        self.write(_whole(status, body, content_type, close=self._closing, bare=self._request.method == b"HEAD"))

    def begin(self, content_type: bytes) -> None:
        """Begin an answer whose length is not known; `piece` and `end` follow. To HTTP/1.0 the connection's end ends
        it."""
        assert self._request is not None
        self.status = 200
        self._closing |= self._request.version != "1.1" or not self._request.keep_alive
        framing = b"transfer-encoding: chunked\r\n" if self._request.version == "1.1" else b""
        closing = b"connection: close\r\n" if self._closing else b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncache-control: no-cache\r\n%s%s\r\n"
        self.write(head % (content_type, framing, closing))

    def piece(self, data: bytes) -> None:
        """More of the answer, at least one byte."""
        assert self._request is not None
        self.write(b"%x\r\n%b\r\n" % (len(data), data) if self._request.version == "1.1" else data)

    def end(self) -> None:
        """That was all of it."""
        assert self._request is not None
        if self._request.version == "1.1":
            self.write(b"0\r\n\r\n")

    def write(self, data: bytes) -> None:
        """Send bytes; those to a client that has gone are dropped."""
        self._begun = True
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

    def finish(self) -> None:
        """Close, now or behind the answer that is on its way."""
        self._closing = True
        if self.task is None:
            self.close()

    # One request after the other

    def _start(self, request: Request) -> None:
        self._request, self.status, self._begun = request, 0, False
        self.task = self._loop.create_task(self._handle(request))

    async def _handle(self, request: Request) -> None:
        try:
            await self._application(request, self)
            if not request.keep_alive:
                self._closing = True
        except Exception:  # an application's fault is told to its client and to the log, and ends no other connection
            _LOG.exception("%s %s", request.method.decode(), request.target.decode("latin-1"))
            if self._begun:
                self.abort()
            else:
                self.answer(500, self._application.refusal(request, 500, "the server failed", "server_error"))
        finally:
            self.task = self.on_pause = self._request = None
            self._next()

    def _next(self) -> None:
        self.heard = self._loop.time()
        if self._transport is None:
            return
        if self._closing:
            self.close()
        elif self._waiting:
            self._start(self._waiting.popleft())
        elif self._refusal:
            self._turn_away()

    def _refuse_large(self) -> None:
        self._refuse(413, f"the body has more than {self._application.max_body} bytes", "request_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer what cannot be read, when it is its turn. Nothing more is read."""
        if self._refusal:
            return
        body = self._application.refusal(self._read(b""), status, message, code)
        self._refusal = _whole(status, body, _JSON, close=True)
        if self.task is None:
            self._turn_away()

    def _turn_away(self) -> None:
        assert self._transport is not None
        self.write(self._refusal)
        self._transport.write_eof()
        self._loop.call_later(_LINGER, self.abort)


def _whole(status: int, body: object, content_type: bytes, *, close: bool, bare: bool = False) -> bytes:
    """A whole answer; `bare`, to a HEAD request, without its body."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    closing = b"connection: close\r\n" if close else b""
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n"
    head = head % (status, _REASONS.get(status, b""), content_type, len(data), closing)
    return head if bare else head + data
