"""The HTTP side of the router and of the session server: framing, order, limits, and what becomes of failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from miles_core.routing import client_side, http_server
from miles_core.routing.client_side import ClientConnection
from miles_core.routing.http_server import HttpServer
from miles_core.routing.wire import Request


class Echo:
    """Answers with what was asked; some paths do otherwise."""

    max_body = 100

    def __init__(self) -> None:
        self.cancelled = 0
        self.gate = asyncio.Event()

    async def __call__(self, request: Request, client: ClientConnection) -> None:
        match request.path:
            case "/fail":
                raise RuntimeError("oh")
            case "/break":
                client.begin(b"text/plain")
                client.piece(b"some")
                raise RuntimeError("oh")
            case "/stream":
                client.begin(b"text/plain")
                for piece in (b"some ", b"more"):
                    await asyncio.sleep(0)
                    client.piece(piece)
                client.end()
            case "/wait":
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
                client.answer(200, {})
            case path:
                client.answer(200, f"{request.method.decode()} {path} ".encode() + request.body)

    def refusal(self, request: Request, status: int, message: str, code: str) -> object:
        return {"path": request.path, "code": code}


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Echo, HttpServer]]:
    app = Echo()
    server = HttpServer(app)
    await server.start()
    try:
        yield app, server
    finally:
        await server.close()


async def talk(server: HttpServer, *data: bytes) -> bytes:
    """All that comes back until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in data:
        writer.write(piece)
        await asyncio.sleep(0.01)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def head(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: x", *headers, "", ""]).encode()


LAST = head("/last", "connection: close")


async def test_paths_are_read_without_their_escapes_and_query():
    async with served() as (_, server):
        asked = (head("/a%20b?c=d"), head("http://host:1/e/f?g"), head("*", method="OPTIONS"))
        answer = await talk(server, *asked, LAST)
    for said in (b"GET /a b ", b"GET /e/f ", b"OPTIONS / ", b"GET /last "):
        assert said in answer


async def test_an_answer_to_head_has_no_body():
    async with served() as (_, server):
        answer = await talk(server, head("/x", method="HEAD"), LAST)
    assert b"content-length: 8\r\n\r\nHTTP/1.1 200 OK" in answer


async def test_streams_are_chunked_or_end_with_the_connection():
    async with served() as (_, server):
        chunked = await talk(server, head("/stream", "connection: close"))
        plain = await talk(server, head("/stream", version="1.0"))
    assert chunked.endswith(b"\r\n\r\n5\r\nsome \r\n4\r\nmore\r\n0\r\n\r\n")
    assert plain.endswith(b"\r\n\r\nsome more")
    assert b"chunked" not in plain


async def test_a_failure_is_a_500_and_a_broken_answer_is_not_shortened(caplog: pytest.LogCaptureFixture):
    async with served() as (_, server):
        with caplog.at_level(logging.CRITICAL):
            answer = await talk(server, head("/fail"), LAST)
            broken = await talk(server, head("/break"))
    assert not broken.endswith(b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b'{"path":"/fail","code":"server_error"}' in answer
    assert answer.endswith(b"GET /last ")


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (head("/large", "content-length: 101", method="POST"), 413, b"request_too_large"),
        (
            head("/large", "transfer-encoding: chunked", method="POST") + b"65\r\n" + b"x" * 101 + b"\r\n0\r\n\r\n",
            413,
            b"request_too_large",
        ),
        (head("/long", "x: " + "y" * 70_000), 200, b""),
        (b"nonsense\r\n\r\n", 400, b"bad_request"),
        (head("/socket", "connection: upgrade", "upgrade: websocket"), 400, b"no_upgrade"),
    ],
)
async def test_what_cannot_be_read_is_refused_behind_what_came_before(data: bytes, status: int, code: bytes):
    async with served() as (app, server):
        waiting = asyncio.create_task(talk(server, head("/wait"), data, LAST))
        await asyncio.sleep(0.1)
        app.gate.set()
        answer = await waiting
    first, _, second = answer.removeprefix(b"HTTP/1.1 ").partition(b"HTTP/1.1 ")
    assert first.startswith(b"200 OK")
    assert second.startswith(b"%d " % status)
    assert code in second
    assert answer.endswith(b"GET /last ") == (status == 200)


async def test_headers_without_end_are_refused():
    async with served() as (_, server):
        answer = await talk(server, b"GET /x HTTP/1.1\r\nx: ", *[b"y" * 30_000] * 4)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_an_upgrade_to_another_http_is_ignored():
    async with served() as (_, server):
        answer = await talk(server, head("/x", "connection: upgrade, http2-settings", "upgrade: h2c") + LAST)
    assert answer.count(b"HTTP/1.1 200") == 2


async def test_a_client_that_leaves_cancels_its_request_and_what_it_sent_behind():
    async with served() as (app, server):
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head("/wait") + head("/wait"))
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.1)
        assert app.cancelled == 1


async def test_closing_gives_what_is_under_way_its_time():
    app = Echo()
    server = HttpServer(app)
    await server.close()
    await server.start()
    asking = [asyncio.create_task(talk(server, head("/wait"))) for _ in range(2)]
    await asyncio.sleep(0.1)
    asyncio.get_running_loop().call_later(0.1, app.gate.set)
    await server.close(grace=5.0)
    for answer in await asyncio.gather(*asking):
        assert b"HTTP/1.1 200 OK" in answer
    assert app.cancelled == 0
    await server.close()


async def test_idle_connections_are_closed_and_working_ones_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "_IDLE", 0.1)
    async with served() as (app, server):
        working = asyncio.create_task(talk(server, head("/wait")))
        assert await talk(server) == b""
        await asyncio.sleep(0.3)
        assert not working.done()
        app.gate.set()
        assert b"200 OK" in await working


async def test_a_refused_client_that_stays_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_side, "_LINGER", 0.05)
    async with served() as (_, server):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"nonsense\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        await asyncio.sleep(0.2)
        assert not server._open
        writer.close()
