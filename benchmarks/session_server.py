"""The session server under load, beside a bare reverse proxy and rllm-model-gateway (PyPI) with the same request bytes.

    python benchmarks/session_server.py [--sessions 16] [--turns 64] [--rounds 5]

The engine answers at once with 32 tokens; every request carries its whole history. Each server has one core, clients
and engine the other one, rounds alternate. Printed: turns per second of each, the session server's CPU of early and
late turns beyond what it takes to read their bytes as JSON, its event loop's longest stall, and the memory of sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from _load import Reply, cpu_seconds, drive, send, serve_engine, serve_proxy, start, start_module

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Sampling
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.engines.pool import EnginePool
from miles_core.routing.client_side import ClientConnection
from miles_core.routing.wire import Request
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.matchers import ToolArgumentsMatcher
from miles_core.tito.server import SessionApp
from miles_core.tito.serving import SessionServer
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.store import SessionStore
from miles_core.tito.tree import Added, Part

REPLY_TOKENS = 32
CONTENT = "x" * (REPLY_TOKENS - 1)


def tokenizer() -> FileTokenizer:
    return load_tokenizer(write_tokenizer(Path(tempfile.mkdtemp())))


def codec() -> Codec:
    return Codec(
        family=ChatMLFamily(ChatMLConfig()), tokenizer=tokenizer(), matcher=ToolArgumentsMatcher(ComponentConfig())
    )


def reply() -> Reply:
    found = tokenizer()
    ids = [*found.encode(CONTENT), found.special("<|im_end|>")]
    meta = {
        "id": "RID",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": 987654321012,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "0",
        "output_token_logprobs": [[-1.25 - i / 8, token, None] for i, token in enumerate(ids)],
    }
    message = {"role": "assistant", "content": CONTENT}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": []}}
    chat = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return Reply(
        generation=orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta}),
        chat=orjson.dumps({**chat, "prompt_token_ids": [1, 2, 3], "usage": {"prompt_tokens": 3}}),
    )


def serve_sessions(port: Any, engine: str, core: int) -> None:
    """The session server. `/read` reads a body as JSON and no more, `/stall` tells the loop's longest stall."""
    from miles_core.eventloop import run

    os.sched_setaffinity(0, {core})

    async def serve() -> None:
        longest = 0.0
        pool = EnginePool([engine])

        def opened(_: Any) -> SessionSettings:
            return SessionSettings(engine=pool, sampling=Sampling(max_new_tokens=64))

        class Measured(SessionApp):
            async def __call__(self, request: Request, client: ClientConnection) -> None:
                nonlocal longest
                if request.target == b"/read":
                    orjson.loads(request.body)
                    client.answer(200, {})
                elif request.target == b"/stall":
                    client.answer(200, longest)
                    longest = 0.0
                else:
                    await super().__call__(request, client)

        server = SessionServer(Measured(SessionStore(codec()), settings=opened))
        port.put(int((await server.start()).rpartition(":")[2]))
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            longest = max(longest, time.perf_counter() - before - 0.002)

    run(serve())


def histories(turns: int) -> list[bytes]:
    """The request body of each turn: all messages so far."""
    messages, bodies = [{"role": "system", "content": "You help."}], []
    for number in range(turns):
        messages.append({"role": "user", "content": f"question {number} " + "word " * 8})
        bodies.append(orjson.dumps({"model": "m", "messages": messages}))
        messages.append({"role": "assistant", "content": CONTENT})
    return bodies


def request(path: str, body: bytes, token: str = "x") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {token}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def post(url: str, body: bytes = b"{}") -> Any:
    asked = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as response:
        return orjson.loads(response.read())


def load(name: str, url: str, sessions: int, bodies: Sequence[bytes]) -> list[list[bytes]]:
    """The requests of each session."""
    if name == "bare aiohttp proxy":
        return [[request("/v1/chat/completions", body) for body in bodies] for _ in range(sessions)]
    if name == "rllm-model-gateway":
        ids = [post(f"{url}/sessions")["session_id"] for _ in range(sessions)]
        return [[request(f"/sessions/{i}/v1/chat/completions", body) for body in bodies] for i in ids]
    opened = [post(f"{url}/sessions") for _ in range(sessions)]
    return [[request(f"/sessions/{o['id']}/v1/chat/completions", body, o["token"]) for body in bodies] for o in opened]


def rate(name: str, url: str, sessions: int, bodies: Sequence[bytes]) -> float:
    """Turns per second; ends the benchmark when one of them failed."""
    seconds, statuses = drive(url, load(name, url, sessions, bodies))
    if statuses != {200: sessions * len(bodies)}:
        raise SystemExit(f"{name} answered {statuses}")
    return sessions * len(bodies) / seconds


def turn_costs(pid: int, url: str, bodies: Sequence[bytes], rounds: int) -> tuple[list[float], list[float]]:
    """CPU seconds a turn of turns 2 to 10, and of turns 119 to 128: of the turn, and of reading the same bytes as JSON;
    medians of the rounds."""
    sessions = 32
    found: list[list[float]] = []

    async def spend(connections: Sequence[Sequence[bytes]]) -> float:
        before = cpu_seconds(pid)
        await send(url, connections)
        return (cpu_seconds(pid) - before) / sum(map(len, connections))

    async def measure(requests: Sequence[Sequence[bytes]]) -> list[float]:
        done, costs = 0, []
        for first, last in ((1, 10), (118, 128)):
            await spend([each[done:first] for each in requests])
            done = last
            costs.append(await spend([each[first:last] for each in requests]))
            costs.append(await spend([[request("/read", body) for body in bodies[first:last]]] * sessions))
        return costs

    for _ in range(rounds):
        found.append(asyncio.run(measure(load("sessions", url, sessions, bodies))))
    medians = [statistics.median(each) for each in zip(*found, strict=True)]
    return medians[:2], medians[2:]


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
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-sessions", type=int, default=1000)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    theirs, own = cores[0], cores[-1]
    os.sched_setaffinity(0, {own})
    bodies = histories(max(options.turns, 128))
    running = [start(serve_engine, reply(), own)]
    engine = running[0][1]
    systems: dict[str, tuple[Any, str]] = {}
    try:
        systems["session server"] = start(serve_sessions, engine, theirs)
        systems["bare aiohttp proxy"] = start(serve_proxy, engine, theirs)
        systems["rllm-model-gateway"] = start_module(
            "rllm_model_gateway", theirs, "--worker", engine, "--store", "memory", "--log-level", "error"
        )
        rates: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(options.rounds + 1):  # the first warms up
            for name, (_, url) in systems.items():
                rates[name].append(rate(name, url, options.sessions, bodies[: options.turns]))
        process, url = systems["session server"]
        early, late = turn_costs(process.pid, url, bodies, options.rounds)
        post(f"{url}/stall")
        stalls = []
        for _ in range(options.rounds):
            rate("session server", url, options.sessions, bodies[: options.turns])
            stalls.append(float(post(f"{url}/stall")))
    finally:
        for process, _ in [*systems.values(), *running]:
            process.terminate()
            process.wait() if isinstance(process, subprocess.Popen) else process.join()
    proxy = statistics.median(rates["bare aiohttp proxy"][1:])
    print(
        f"{options.sessions} sessions, {options.turns} turns, {REPLY_TOKENS} tokens a reply; median of {options.rounds}"
    )
    print("| system | turns/s | of the proxy |\n|---|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values[1:]):.0f} | {statistics.median(values[1:]) / proxy:.2f} |")
    print("\n| turns | server CPU, ms | reading its bytes, ms | beyond that, ms |\n|---|---|---|---|")
    for what, (whole, reading) in (("2 to 10", early), ("119 to 128", late)):
        print(f"| {what} | {1e3 * whole:.2f} | {1e3 * reading:.2f} | {1e3 * (whole - reading):.2f} |")
    print(f"\nlate over early: {(late[0] - late[1]) / (early[0] - early[1]):.2f}")
    print(
        f"longest stall of the event loop: {1e3 * statistics.median(stalls):.1f} ms, worst {1e3 * max(stalls):.1f} ms"
    )
    size = memory(options.memory_sessions, 64, 300)
    print(f"{size / 1024:.0f} KiB a session of 64 turns of 300 tokens: {1e4 * size / 2**30:.2f} GiB for 10,000")


if __name__ == "__main__":
    main()
