"""Requests per second through the router, sglang-router (PyPI, Rust) and a bare aiohttp proxy, one core each.

    python benchmarks/router.py [--requests 20000] [--rounds 5]

Four engines that answer at once with a generation of 32 tokens; 64 connections, one session each, prompts of 1,000 ids.
The router under test has one core; clients and engines have the other one. Rounds alternate between the systems; the
table shows medians. CPU is that of the router's process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from typing import Any

import orjson
from _load import Reply, cpu_seconds, drive, free_port, serve_engine, serve_proxy, start, start_module

CONNECTIONS = 64
ENGINES = 4
META = {
    "id": "r",
    "finish_reason": {"type": "stop", "matched": 2},
    "prompt_tokens": 1000,
    "completion_tokens": 32,
    "cached_tokens": 960,
    "weight_version": "0",
    "output_token_logprobs": [[-1.25 - i / 8, i, None] for i in range(32)],
}
REPLY = Reply(generation=orjson.dumps({"text": "", "output_ids": list(range(32)), "meta_info": META}), chat=b"{}")


def request(session: int) -> bytes:
    body = orjson.dumps(
        {"rid": f"s{session}", "input_ids": list(range(1000)), "sampling_params": {"max_new_tokens": 32}}
    )
    head = (
        f"POST /generate HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        f"x-smg-routing-key: s{session}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def serve_router(port: Any, engines: list[str], core: int) -> None:
    from miles_core.eventloop import run
    from miles_core.routing.serving import RouterServer

    os.sched_setaffinity(0, {core})

    async def serve() -> None:
        server = RouterServer(engines)
        port.put(int((await server.start()).rpartition(":")[2]))
        await asyncio.Event().wait()

    run(serve())


def start_sglang_router(engines: list[str], core: int) -> tuple[Any, str]:
    ports = ("--prometheus-port", str(free_port()))
    limits = ("--max-concurrent-requests", "100000", "--log-level", "error")
    return start_module(
        "sglang_router.launch_router", core, "--worker-urls", *engines, "--policy", "manual", *ports, *limits
    )


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    theirs, own = cores[0], cores[-1]
    os.sched_setaffinity(0, {own})
    running = [start(serve_engine, REPLY, own) for _ in range(ENGINES)]
    engines = [url for _, url in running]
    systems: dict[str, tuple[Any, str]] = {
        "miles-core router": start(serve_router, engines, theirs),
        "sglang-router": start_sglang_router(engines, theirs),
        "bare aiohttp proxy": start(serve_proxy, engines[0], theirs),
    }
    each = options.requests // CONNECTIONS
    load = [[request(session)] * each for session in range(CONNECTIONS)]
    rates: dict[str, list[float]] = {name: [] for name in systems}
    costs: dict[str, list[float]] = {name: [] for name in systems}
    try:
        for _ in range(options.rounds + 1):  # the first warms up
            for name, (process, url) in systems.items():
                before = cpu_seconds(process.pid)
                seconds, statuses = drive(url, load)
                if statuses != {200: each * CONNECTIONS}:
                    raise SystemExit(f"{name} answered {statuses}")
                rates[name].append(each * CONNECTIONS / seconds)
                costs[name].append((cpu_seconds(process.pid) - before) / (each * CONNECTIONS))
    finally:
        for process, _ in [*systems.values(), *running]:
            process.terminate()
    rival = statistics.median(rates["sglang-router"][1:])
    print("| system | requests/s | of sglang-router | router CPU, µs a request |")
    print("|---|---|---|---|")
    for name in systems:
        rate, cost = statistics.median(rates[name][1:]), statistics.median(costs[name][1:])
        print(f"| {name} | {rate:.0f} | {rate / rival:.2f} | {1e6 * cost:.0f} |")


if __name__ == "__main__":
    main()
