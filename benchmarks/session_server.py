"""The session server under load, beside a bare reverse proxy that is given the same request bytes.

    python benchmarks/session_server.py [--sessions 16] [--turns 64]

Engine: a stub in a process of its own, which answers at once with 32 tokens. Every request carries its whole history.
Printed: turns per second of both, the server's CPU a turn early and late in a session, the longest stall of its event
loop, and the memory of many open sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Sampling
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.engines.pool import EnginePool
from miles_core.testing.stub_engine import StubEngine
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.matchers import ToolArgumentsMatcher
from miles_core.tito.server import SessionApp
from miles_core.tito.serving import SessionServer
from miles_core.tito.sessions import Codec, SessionSettings, SessionStore
from miles_core.tito.tree import Added, Part

REPLY_TOKENS = 32


def tokenizer() -> FileTokenizer:
    return load_tokenizer(write_tokenizer(Path(tempfile.mkdtemp())))


def codec() -> Codec:
    return Codec(
        family=ChatMLFamily(ChatMLConfig()), tokenizer=tokenizer(), matcher=ToolArgumentsMatcher(ComponentConfig())
    )


async def serve_stub(port: Any) -> None:
    found = tokenizer()
    ids = [*found.encode("x" * (REPLY_TOKENS - 1)), found.special("<|im_end|>")]
    engine = StubEngine(lambda *_: ids)
    engine.requests = _Nothing()  # type: ignore[assignment]
    runner = web.AppRunner(engine.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port.put(runner.addresses[0][1])
    await asyncio.Event().wait()


class _Nothing(list[Any]):
    """A stub that serves a hundred thousand requests must not keep them."""

    def __iadd__(self, other: Any) -> _Nothing:  # type: ignore[misc,override]
        return self


async def serve_proxy(port: Any, engine: str) -> None:
    """Reads the request, asks the engine for a fixed prompt, answers with a fixed body."""
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    ask = orjson.dumps({"rid": "x", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 64}})
    answer = orjson.dumps({"choices": [{"message": {"role": "assistant", "content": "x" * (REPLY_TOKENS - 1)}}]})

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        async with client.post(f"{engine}/generate", data=ask) as response:
            await response.read()
        return web.Response(body=answer, content_type="application/json")

    application = web.Application(client_max_size=1 << 30)
    application.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port.put(runner.addresses[0][1])
    await asyncio.Event().wait()


@dataclasses.dataclass
class Gauges:
    """What the server's process says of itself, by `/sessions/gauges` of this benchmark alone."""

    stall: float = 0.0


async def serve_sessions(port: Any, engine: str) -> None:
    pool, gauges = EnginePool([engine]), Gauges()

    def opened(_: Any) -> SessionSettings:
        return SessionSettings(engine=pool, sampling=Sampling(max_new_tokens=64))

    app = SessionApp(SessionStore(codec()), settings=opened)

    async def measured(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/gauges":
            await app(scope, receive, send)
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        body = orjson.dumps([usage.ru_utime + usage.ru_stime, gauges.stall])
        gauges.stall = 0.0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    server = SessionServer(app)
    server.app = measured  # type: ignore[assignment]
    url = await server.start()
    port.put(int(url.rpartition(":")[2]))
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        gauges.stall = max(gauges.stall, time.perf_counter() - before - 0.005)


def run(target: Any, *arguments: Any) -> None:
    asyncio.run(target(*arguments))


def start(target: Any, *arguments: Any) -> tuple[Any, str]:
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    process = context.Process(target=run, args=(target, port, *arguments), daemon=True)
    process.start()
    return process, f"http://127.0.0.1:{port.get(timeout=60)}"


async def drive(url: str, bodies: list[bytes], sessions: int, *, opens: bool) -> tuple[float, list[float]]:
    """Turns per second, and the server's CPU seconds at the end of each turn (all sessions take it together)."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        places: list[tuple[str, dict[str, str]]] = [(f"{url}/x", {})] * sessions
        if opens:
            places = []
            for _ in range(sessions):
                async with http.post(f"{url}/sessions", json={}) as response:
                    opened = await response.json()
                base = f"{opened['base_url']}/v1/chat/completions"
                places.append((base, {"Authorization": f"Bearer {opened['token']}"}))
        cpu: list[float] = []

        async def turn(place: tuple[str, dict[str, str]], body: bytes) -> None:
            async with http.post(place[0], data=body, headers=place[1]) as response:
                answer = await response.read()
                assert response.status == 200, answer

        begin = time.perf_counter()
        for body in bodies:
            await asyncio.gather(*(turn(place, body) for place in places))
            if opens:
                async with http.get(f"{url}/gauges") as response:
                    cpu.append((await response.json(content_type=None))[0])
        return sessions * len(bodies) / (time.perf_counter() - begin), cpu


def histories(turns: int) -> list[bytes]:
    """The request body of each turn: all messages so far."""
    messages, bodies = [{"role": "system", "content": "You help."}], []
    for number in range(turns):
        messages.append({"role": "user", "content": f"question {number} " + "word " * 8})
        bodies.append(orjson.dumps({"model": "m", "messages": messages}))
        messages.append({"role": "assistant", "content": "x" * (REPLY_TOKENS - 1)})
    return bodies


def memory(sessions: int, turns: int, tokens: int) -> float:
    """Bytes a session, of sessions whose turns add so many tokens each, half of them sampled."""
    store = SessionStore(codec())
    message = orjson.dumps([{"role": "user", "content": "w" * 600}, {"role": "assistant", "content": "v" * 600}])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(sessions):
        settings = SessionSettings(engine=None, sampling=Sampling(max_new_tokens=1))  # type: ignore[arg-type]
        tree, history = store.open(settings).tree, ()
        for turn in range(turns):
            key = (number * turns + turn).to_bytes(16, "big")
            added = Added(
                turn_id=f"{number}-{turn}",
                drop=0,
                ids=np.zeros(tokens, np.int32),
                sampled=tokens // 2,
                logprobs=np.zeros(tokens - tokens // 2, np.float32),
                versions=((0, tokens - tokens // 2),),
                finish_reason="stop",
                parts=(
                    Part(
                        count=tokens // 2,
                        finish_reason="stop",
                        engine="e",
                        cached_tokens=0,
                        started=0.0,
                        finished=0.0,
                        request_id=f"{number}:{turn}",
                    ),
                ),
                messages=bytes(bytearray(message)),
            )
            plan = tree.plan(b"", (*history, key))
            tree.commit(plan, key, added)
            history = (*history, key, key)
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / sessions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--memory-sessions", type=int, default=500)
    options = parser.parse_args()
    bodies = histories(max(options.turns, 128))
    stub, engine = start(serve_stub)
    proxy, proxy_url = start(serve_proxy, engine)
    server, server_url = start(serve_sessions, engine)
    try:
        bare, _ = asyncio.run(drive(proxy_url, bodies[: options.turns], options.sessions, opens=False))
        asyncio.run(drive(server_url, bodies[:8], 4, opens=True))  # warm
        rate, _ = asyncio.run(drive(server_url, bodies[: options.turns], options.sessions, opens=True))
        _, cpu = asyncio.run(drive(server_url, bodies[:128], 32, opens=True))
        early, late = np.diff(cpu[:10]).mean() / 32, np.diff(cpu[-10:]).mean() / 32
        size = memory(options.memory_sessions, 64, 300)

        async def stall() -> float:
            async with aiohttp.ClientSession() as http, http.get(f"{server_url}/gauges") as response:
                return float((await response.json(content_type=None))[1])

        print(f"{options.sessions} sessions, {options.turns} turns, {REPLY_TOKENS} tokens a reply, whole histories")
        print(f"bare proxy            {bare:8.0f} turns/s")
        print(f"session server        {rate:8.0f} turns/s   {rate / bare:.2f} of the proxy")
        print(f"server CPU a turn     {1e3 * early:8.2f} ms at turns 2 to 10, {1e3 * late:.2f} ms at turns 119 to 128")
        print(f"longest loop stall    {1e3 * asyncio.run(stall()):8.1f} ms")
        print(
            f"memory                {size / 1024:8.0f} KiB a session of 64 turns of 300 tokens: "
            f"{1e4 * size / 2**30:.2f} GiB for 10,000"
        )
    finally:
        for process in (server, proxy, stub):
            process.terminate()
            process.join()


if __name__ == "__main__":
    main()
