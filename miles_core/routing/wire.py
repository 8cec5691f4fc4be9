"""HTTP/1.1 between a client, a server of ours and its engines, parsed no further than framing needs.

Requests are held whole, because one that an engine did not take is sent to another. Answers are handed on byte by byte
as they come, whatever they are: the parser only says where they begin, with what status, and where they end.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

__all__ = [
    "BodyExchange",
    "BrokenAnswerError",
    "EndedError",
    "Exchange",
    "Receiver",
    "Request",
    "request_head",
]

_OF_ONE_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)


@dataclasses.dataclass(slots=True)
class Request:
    """A whole request. `target` is path and query as the client spelled them; header names are lower case."""

    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    keep_alive: bool = True
    version: str = "1.1"

    @property
    def path(self) -> str:
        """The target's path, without its escapes."""
        path = self.target.partition(b"?")[0].decode("latin-1")
        if not path.startswith("/"):  # the absolute form (RFC 9112, section 3.2.2)
            path = "/" + path.partition("://")[2].partition("/")[2]
        return unquote(path) if "%" in path else path

    def header(self, name: bytes) -> str:
        """The header's first value; empty when there is none."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return ""


def request_head(request: Request, host: bytes, length: int) -> bytes:
    """The head that goes to an engine: every header of the client's but those of one hop, and the framing of a body of
    `length` bytes."""
    lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (request.method, request.target, host)]
    lines += [
        b"%s: %s\r\n" % (name, value)
        for name, value in request.headers
        if name not in _OF_ONE_HOP and name not in (b"host", b"content-length")
    ]
    if length or request.method not in (b"GET", b"HEAD"):
        lines.append(b"content-length: %d\r\n" % length)
    lines.append(b"\r\n")
    return b"".join(lines)


class Receiver(Protocol):
    """Where an answer goes."""

    def begin(self, status: int) -> bool:
        """The status is known; whether the answer is to be handed on (otherwise it is read and dropped)."""
        ...

    def take(self, data: bytes) -> None: ...


class BrokenAnswerError(ConnectionError):
    """The engine's connection ended or spoke no HTTP before its answer was whole."""


class EndedError(BrokenAnswerError):
    """It was ended on purpose, from this side."""


class Exchange(asyncio.Protocol):
    """One connection to an engine, used for one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[bool] | None = None
        self._held: list[bytes] = []
        self._headers_seen = self._framed = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._done is None or self._done.done():
            self.abort()  # bytes that nobody asked for: what follows on this connection would be misread
            return
        done = self._done
        if not self._headers_seen:
            self._held.append(data)
        elif self._receiver is not None:
            self._hand_on(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(BrokenAnswerError(f"no HTTP: {error}"))
            return
        if not done.done() and self._headers_seen and self._held:
            self._release()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self._done is not None and not self._done.done():
            if self._headers_seen and not self._framed and error is None:
                self._done.set_result(False)  # without a length, the end of the connection ends the answer
            else:
                self._done.set_exception(BrokenAnswerError(f"the connection ended early: {error or 'closed'}"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._framed |= status in (204, 304)
        self._headers_seen = True
        if self._receiver is not None and not self._receiver.begin(status):
            self._receiver = None

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._headers_seen or self._done is None or self._done.done():
            return  # 100 Continue: the answer follows
        self._release()
        self._done.set_result(bool(self._parser.should_keep_alive()) and self._framed)

    # What the router calls

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def answered(self) -> bool:
        """Whether the answer of the last request had begun."""
        return self._headers_seen

    async def send(self, head: bytes, body: bytes, receiver: Receiver) -> bool:
        """Send a request and hand its answer to `receiver`; whether the connection may be used again. Cancelling it
        closes the connection, which tells the engine to stop. Raises `BrokenAnswerError`."""
        if not self.usable:
            raise BrokenAnswerError("the connection had ended")
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver, self._held, self._headers_seen, self._framed = receiver, [], False, False
        self._done = asyncio.get_running_loop().create_future()
        self.transport.writelines((head, body))
        try:
            return await self._done
        except BaseException:
            self.abort()
            raise
        finally:
            self._parser = self._receiver = None

    def pause(self, paused: bool) -> None:
        """The client takes no more for now, or takes again."""
        if self.transport is None or self.transport.is_closing():
            return
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def fail(self, error: Exception) -> None:
        """End the exchange that is on its way with `error`, and the connection."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.abort()

    def _release(self) -> None:
        if self._receiver is not None:
            for data in self._held:
                self._hand_on(data)
        self._held = []

    def _hand_on(self, data: bytes) -> None:
        assert self._receiver is not None
        self._receiver.take(data)


class BodyExchange(Exchange):
    """An exchange whose receiver takes the answer's body, without head and framing."""

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.take(data)

    def _hand_on(self, data: bytes) -> None:
        pass
