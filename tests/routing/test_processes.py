"""The router as users run it: a process over four embedded engines, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

pytest.importorskip("torch")

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Sampling
from miles_core.data.tokenizer import load_tokenizer
from miles_core.engines.pool import EnginePool
from miles_core.testing.tiny import tiny_model
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.matchers import ToolArgumentsMatcher
from miles_core.tito.server import SessionApp
from miles_core.tito.serving import SessionServer
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.store import SessionStore

ENGINES, SESSIONS, TURNS = 4, 8, 16
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process of ours and the URL that its ready line names."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    try:
        async with asyncio.timeout(60):
            url = json.loads(await started.stdout.readline())["url"]
        yield started, url
    finally:
        if started.returncode is None:
            started.send_signal(signal.SIGTERM)
        await asyncio.wait_for(started.wait(), 20)


def sessions(store: SessionStore, pool: EnginePool) -> Sequence[Session]:
    often = tuple(range(0, 320, 4))  # a model with random weights hardly ever ends a turn by itself
    settings = SessionSettings(engine=pool, sampling=Sampling(max_new_tokens=64, stop_token_ids=often))
    return [store.open(settings) for _ in range(SESSIONS)]


async def turn(http: aiohttp.ClientSession, base: str, session: Session, messages: list[dict[str, Any]]) -> None:
    """One more turn of an agent: what its tool said goes in, what the model said is kept."""
    messages.append({"role": "user", "content": f"result {len(messages)}"})
    headers = {"Authorization": f"Bearer {session.token}"}
    url = f"{base}/sessions/{session.id}/v1/chat/completions"
    async with http.post(url, json={"model": "m", "messages": messages}, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


async def test_a_killed_engine_loses_no_turn_and_sessions_keep_their_prefix() -> None:
    model = str(tiny_model())
    async with AsyncExitStack() as stack:
        starting = [
            stack.enter_async_context(process("miles_core.engines.embedded", "--model", model, "--threads", "1"))
            for _ in range(ENGINES)
        ]
        engines = [await each for each in starting]
        told = [part for _, url in engines for part in ("--engine", url)]
        _, router = await stack.enter_async_context(
            process("miles_core.cli.main", "serve", "router", *told, "--watch-interval", "0.2")
        )
        codec = Codec(
            family=ChatMLFamily(ChatMLConfig()),
            tokenizer=load_tokenizer(tiny_model()),
            matcher=ToolArgumentsMatcher(ComponentConfig()),
        )
        pool = EnginePool([router], router=True, deadline=60.0)
        stack.push_async_callback(pool.close)
        server = SessionServer(SessionApp(SessionStore(codec)))
        base = await server.start()
        stack.push_async_callback(server.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        opened = sessions(server.app.store, pool)
        histories = [[{"role": "system", "content": "You call tools. " * 4}] for _ in opened]

        async def one(session: Session, history: list[dict[str, Any]], turns: int) -> None:
            for _ in range(turns):
                await turn(http, base, session, history)

        async def places() -> list[dict[str, Any]]:
            found = []
            for session in opened:
                async with http.get(f"{router}/router/sessions", params={"key": session.id}) as response:
                    found.append(await response.json())
            return found

        await asyncio.gather(*(one(s, h, TURNS) for s, h in zip(opened, histories, strict=True)))
        before = await places()
        assert {place["moves"] for place in before} == {0}
        assert sorted(place["engine"] for place in before) == sorted(2 * [url for _, url in engines])
        rate = sum(p["cached_tokens"] for p in before) / sum(p["prompt_tokens"] for p in before)
        assert rate >= 0.9, rate

        killed, gone = engines[0]
        more = asyncio.gather(*(one(s, h, 4) for s, h in zip(opened, histories, strict=True)))
        await asyncio.sleep(0.05)
        killed.kill()
        await more
        after = await places()
        assert gone not in {place["engine"] for place in after}
        assert {p["moves"] for b, p in zip(before, after, strict=True) if b["engine"] == gone} == {1}
        assert {p["moves"] for b, p in zip(before, after, strict=True) if b["engine"] != gone} == {0}
        for session, history in zip(opened, histories, strict=True):
            assert session.tree.nodes == TURNS + 4  # every answer is recorded, and once
            assert len(history) == 1 + 2 * (TURNS + 4)
