"""A load generator and an engine that cost next to nothing: what is measured is what stands between them."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httptools

__all__ = ["Reply", "cpu_seconds", "drive", "free_port", "send", "serve_engine", "serve_proxy", "start", "start_module"]


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the engine always says: a generation of 32 tokens, and the same as a chat completion. `RID` and 987654321012
    stand for request id and number of prompt tokens, and are filled in where a stream was asked for."""

    generation: bytes
    chat: bytes


_PROMPTS = re.compile(rb'"input_ids":\[\[?([^\]]*(?:\],\[[^\]]*)*)\]')
_RIDS = re.compile(rb'"rid":(?:\[([^\]]*)\]|("[^"]*"))')


class _Engine(asyncio.Protocol):
    """Answers each request at once with the same generation, as JSON or as a stream of one event for each request id of
    the body; `/server_info` and other paths with a small JSON object."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._body: list[bytes] = []
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._path = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # sglang-router asks first whether this is HTTP/2
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = self._answer() if self._path.startswith((b"/generate", b"/v1/chat")) else _SMALL
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )

    def _answer(self) -> bytes:
        asked = b"".join(self._body)
        if not self._path.startswith(b"/generate"):
            return self._reply.chat
        if b'"stream":true' not in asked:
            return self._reply.generation
        rids, prompts = _RIDS.search(asked), _PROMPTS.search(asked)
        assert rids is not None, "a generation without a request id"
        assert prompts is not None, "a generation without a prompt"
        events = [
            b"data: %s\n\n"
            % self._reply.generation.replace(b'"RID"', rid).replace(b"987654321012", b"%d" % (prompt.count(b",") + 1))
            for rid, prompt in zip((rids[1] or rids[2]).split(b","), prompts[1].split(b"],["), strict=True)
        ]
        return b"".join(events) + b"data: [DONE]\n\n"


_SMALL = b'{"weight_version":"0","version":"x","status":"ok","model_path":"m"}'


class _Client(asyncio.Protocol):
    """One connection that sends its next request when the last is answered."""

    def __init__(self, requests: Sequence[bytes], done: asyncio.Future[None], status: Callable[[int], None]) -> None:
        self._requests = iter(requests)
        self._done = done
        self._status = status
        self._transport: Any = None
        self._parser: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        data = next(self._requests, None)
        if data is None:
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._status(self._parser.get_status_code())
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def _serve(port: Any, reply: Reply) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Engine(reply), "127.0.0.1", 0)
    port.put(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


def serve_engine(port: Any, reply: Reply, core: int | None) -> None:
    """Serve the engine in this process; its port is put into `port`."""
    from miles_core.eventloop import run

    if core is not None:
        os.sched_setaffinity(0, {core})
    run(_serve(port, reply))


def start(target: Any, *arguments: Any) -> tuple[Any, str]:
    """A process that runs `target(port, *arguments)`, and the URL of the port that it tells."""
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    process = context.Process(target=target, args=(port, *arguments), daemon=True)
    process.start()
    return process, f"http://127.0.0.1:{port.get(timeout=60)}"


async def send(url: str, connections: Sequence[Sequence[bytes]]) -> tuple[float, dict[int, int]]:
    """Send each connection's requests one after the other, all connections at once: seconds, and answers by status."""
    loop = asyncio.get_running_loop()
    host, port = url.removeprefix("http://").split(":")
    statuses: dict[int, int] = {}

    def count(status: int) -> None:
        statuses[status] = statuses.get(status, 0) + 1

    ends = []
    begin = time.perf_counter()
    for requests in connections:
        done: asyncio.Future[None] = loop.create_future()
        ends.append(done)
        await loop.create_connection(lambda r=requests, d=done: _Client(r, d, count), host, int(port))  # type: ignore[misc]
    await asyncio.gather(*ends)
    return time.perf_counter() - begin, statuses


def drive(url: str, connections: Sequence[Sequence[bytes]]) -> tuple[float, dict[int, int]]:
    """`send`, from code that is no coroutine."""
    from miles_core.eventloop import run

    return run(send(url, connections))


def serve_proxy(port: Any, engine: str, core: int) -> None:
    """A bare reverse proxy: aiohttp in and out, the same path, no affinity, no retries."""
    import aiohttp
    from aiohttp import web

    from miles_core.eventloop import run

    os.sched_setaffinity(0, {core})

    async def serve() -> None:
        client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

        async def handle(request: web.Request) -> web.Response:
            data = await request.read()
            async with client.post(f"{engine}{request.path}", data=data) as response:
                return web.Response(body=await response.read(), content_type="application/json")

        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    run(serve())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_module(name: str, core: int, *arguments: str) -> tuple[Any, str]:
    """A process of `python -m name` that serves on a port of ours, and its URL, once its `/health` answers."""
    port = free_port()
    command = [sys.executable, "-m", name, "--host", "127.0.0.1", "--port", str(port), *arguments]
    process = subprocess.Popen(
        command,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.2)
    process.terminate()
    raise SystemExit(f"{name} did not start within a minute; is it installed? pip install -e '.[bench]'")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all its threads so far, as the scheduler counts it."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
