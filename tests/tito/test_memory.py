"""Nothing of a session outlives it: not its tree, not its turns, however the session or the turn ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import sys
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from miles_core.contracts.engines import Sampling
from miles_core.data.tokenizer import FileTokenizer
from miles_core.errors import EngineError
from miles_core.tito.sessions import Session
from miles_core.tito.settings import SessionSettings
from miles_core.tito.store import SessionStore
from miles_core.tito.tree import Node
from miles_core.tito.turns import TurnRequest
from tests.tito.serving import Engine, Serving, serving, user

ASK = [user("hello")]

pytestmark = pytest.mark.parametrize("tokenizer", [True], indirect=True)
TURNS = 4
SESSIONS = 2000


class Watch:
    """Sessions and nodes that live, by weak references."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Any]] = []

    def session(self, session: Session) -> None:
        self.seen += [weakref.ref(session), weakref.ref(session.tree)]
        self.seen += [weakref.ref(node) for node in session.tree.walk()]

    def alive(self) -> int:
        for _ in range(3):  # what has a finaliser goes in the pass behind the one that finds it
            gc.collect()
        return sum(reference() is not None for reference in self.seen)


def opened(s: Serving, **changes: Any) -> Serving:
    """Another session on the same server."""
    session = s.store.open(dataclasses.replace(s.session.settings, **changes))
    another = Serving.__new__(Serving)
    another.store, another.session, another.http, another.root = s.store, session, s.http, s.root
    another.base = f"{s.root}/sessions/{session.id}"
    return another


async def fill(s: Serving, **fields: Any) -> None:
    """A few turns, a branch and a retry."""
    messages = list(ASK)
    for number in range(TURNS):
        status, answer = await s.chat(messages, **fields)
        assert status == 200
        messages += [answer["choices"][0]["message"], user(f"more {number}")]
    await s.chat(ASK)
    await s.chat([*messages[:2], user("otherwise")])


async def end(s: Serving) -> None:
    headers = {"Authorization": f"Bearer {s.session.token}"}
    async with s.http.delete(s.base, headers=headers) as response:
        assert response.status == 200


# How a session may go; each has to leave nothing.


async def ended(s: Serving, engine: Engine) -> Session:
    mine = opened(s)
    await fill(mine)
    await end(mine)
    return mine.session


async def expired(s: Serving, engine: Engine) -> Session:
    mine = opened(s, ttl=-1.0)
    await mine.chat(ASK)
    s.store.expire()
    return mine.session


async def failed(s: Serving, engine: Engine) -> Session:
    """Turns that the engine refuses, and requests that are refused."""
    mine = opened(s)
    await mine.chat(ASK)
    engine.failing = True
    try:
        for stream in (False, True):
            assert (await mine.chat([user("broken")], stream=stream))[0] == 502
        assert (await mine.post("v1/chat/completions", {"messages": "x"}))[0] == 400
    finally:
        engine.failing = False
    await end(mine)
    return mine.session


async def left(s: Serving, engine: Engine) -> Session:
    """Clients that go away in the middle of an answer, streamed and not."""
    mine = opened(s)
    await mine.chat(ASK)
    engine.gate = asyncio.Event()
    for stream in (False, True):
        asking = asyncio.create_task(mine.chat([user("never")], stream=stream))
        await until(lambda: engine.waiting == 1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(lambda: engine.waiting == 0)
    engine.gate = None
    await end(mine)
    return mine.session


async def ended_under_a_turn(s: Serving, engine: Engine) -> Session:
    mine = opened(s)
    await mine.chat(ASK)
    engine.gate = asyncio.Event()
    asking = asyncio.create_task(mine.chat([user("never")]))
    await until(lambda: engine.waiting == 1)
    await end(mine)
    assert (await asking)[0] == 404
    engine.gate = None
    return mine.session


async def asked_in_tokens(s: Serving, engine: Engine) -> Session:
    mine = opened(s)
    ids = [65, 66]
    for _ in range(TURNS):
        _, answer = await mine.post("inference/v1/generate", {"token_ids": ids})
        ids += [*answer["choices"][0]["token_ids"], 67]
    await end(mine)
    return mine.session


WAYS = [ended, expired, failed, left, ended_under_a_turn, asked_in_tokens]


class Failing(Engine):
    failing = False

    async def generate(self, *args: Any, **options: Any) -> Any:
        if self.failing:
            raise EngineError("broken")
        del self.asked[:-1], self.answered[:-1]  # the test's own record is no leak of the server's
        return await super().generate(*args, **options)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def run(tokenizer: FileTokenizer, way: Callable[[Serving, Engine], Awaitable[Session]], times: int) -> Watch:
    watch = Watch()
    engine = Failing(tokenizer, "some words")
    async with serving(engine, tokenizer) as s:
        for _ in range(times):
            watch.session(await way(s, engine))
        assert len(s.store) == 1
        await asyncio.sleep(0.05)
        assert watch.seen
        assert watch.alive() == 0, way.__name__
    return watch


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_nothing_of_a_session_outlives_it(tokenizer: FileTokenizer, way: Any):
    watch = await run(tokenizer, way, 10)
    assert len(watch.seen) > 20


async def test_a_leak_is_found(tokenizer: FileTokenizer, monkeypatch: pytest.MonkeyPatch):
    """A store that forgets to let go of what it ended."""
    kept: list[Session] = []
    end_of = SessionStore.end

    def leaking(self: SessionStore, session_id: str) -> None:
        found = self.get(session_id)
        if found is not None:
            kept.append(found)
        end_of(self, session_id)

    monkeypatch.setattr(SessionStore, "end", leaking)
    with pytest.raises(AssertionError, match="ended"):
        await run(tokenizer, ended, 2)


async def test_thousands_of_sessions_leave_no_memory(tokenizer: FileTokenizer):
    """No HTTP here: open, fill and end, and what Python's allocator holds is what it held before."""
    held = nodes()
    async with serving(Failing(tokenizer, "some words"), tokenizer) as s:
        settings = SessionSettings(engine=s.session.settings.engine, sampling=Sampling(max_new_tokens=50))

        async def many(count: int) -> None:
            for _ in range(count):
                session = s.store.open(settings)
                first = await session.turn(TurnRequest(messages=ASK))
                await session.turn(TurnRequest(messages=[*ASK, first.message, user("more")]))
                s.store.end(session.id)

        await many(200)
        before = blocks()
        await many(SESSIONS)
        grown = blocks() - before
    assert grown < SESSIONS / 10, f"{grown} blocks for {SESSIONS} sessions"
    assert nodes() <= held


def blocks() -> int:
    """Blocks that Python's allocator holds: an object is one or more."""
    for _ in range(3):
        gc.collect()
    return sys.getallocatedblocks()


def nodes() -> int:
    """Turns that live: other tests' fixtures may hold some. Not while a server runs, which freezes objects."""
    for _ in range(3):
        gc.collect()
    return sum(type(found) is Node and found.added is not None for found in gc.get_objects())


async def test_streams_of_clients_that_leave_hold_no_task(tokenizer: FileTokenizer):
    engine = Failing(tokenizer, "a long answer of many words")
    async with serving(engine, tokenizer) as s:
        before = len(asyncio.all_tasks())
        engine.gate = asyncio.Event()
        for _ in range(20):
            async with aiohttp.ClientSession() as http:
                headers = {"Authorization": f"Bearer {s.session.token}"}
                body = {"model": "m", "messages": ASK, "stream": True}
                async with http.post(f"{s.base}/v1/chat/completions", json=body, headers=headers) as response:
                    assert await response.content.readany()
        await until(lambda: engine.waiting == 0 and not s.session.running)
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert s.session.tree.nodes == 0
