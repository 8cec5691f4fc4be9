"""Small HTTP services for checks and tests: an aiohttp application in a thread of its own, on a free loopback port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

__all__ = ["ChatService", "dead_url", "json_service", "served"]


@contextmanager
def served(application: Callable[[], web.Application]) -> Iterator[str]:
    """Serve what `application()` makes; yields its base URL. It is called in the serving thread, where its event loop
    runs, so the service answers whatever the caller's own loop is doing."""
    ready = threading.Event()
    state: list[Any] = []

    async def serve() -> None:
        runner = web.AppRunner(application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stop = asyncio.Event()
        host, port = runner.addresses[0][:2]
        state.extend([f"http://{host}:{port}", asyncio.get_running_loop(), stop])
        ready.set()
        await stop.wait()
        await runner.cleanup()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True, name="miles-testing-service")
    thread.start()
    ready.wait()
    if not state:
        raise RuntimeError("the test service did not start; its traceback is on stderr")
    url, loop, stop = state
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def json_service(answer: Callable[[Any], Any]) -> web.Application:
    """Answers every POST with the JSON of `answer(body)`."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    return application


class ChatService:
    """A session of the session server, seen from an agent: Chat Completions under a bearer token.

    Every answer says `reply`. With `hang` requests are taken and never answered. `requests` holds (authorisation
    header, body) of each request.
    """

    def __init__(self, reply: str = "4", *, hang: bool = False) -> None:
        self.reply = reply
        self.hang = hang
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.arrived = threading.Event()

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_post("/sessions/{session}/v1/chat/completions", self._complete)
        return application

    async def _complete(self, request: web.Request) -> web.Response:
        self.requests.append((request.headers.get("Authorization", ""), await request.json()))
        self.arrived.set()
        if self.hang:
            await asyncio.Event().wait()
        message = {"role": "assistant", "content": self.reply}
        return web.json_response(
            {
                "id": f"chatcmpl-{len(self.requests)}",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10},
            }
        )


def dead_url() -> str:
    """A loopback URL on which nobody listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
