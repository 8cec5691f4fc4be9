"""A session server over an engine that says what a test scripts, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Generation, Sampling
from miles_core.data.tokenizer import FileTokenizer
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.matchers import ToolArgumentsMatcher
from miles_core.tito.server import SessionApp
from miles_core.tito.serving import SessionServer
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.store import SessionStore


class Engine:
    """Says `script` in turn (a text, ids, or an exception), token by token; `gate` holds it before its last token."""

    def __init__(self, tokenizer: FileTokenizer, *script: Any) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.special("<|im_end|>")
        self.script = list(script)
        self.asked: list[tuple[list[int], Sampling]] = []
        self.answered: list[Generation] = []
        self.gate: asyncio.Event | None = None
        self.waiting = 0

    async def generate(
        self, input_ids: Sequence[int], sampling: Sampling, *, routing_key: str = "", priority: int = 0, on_tokens=None
    ) -> Generation:
        said = self.script[min(len(self.asked), len(self.script) - 1)]
        self.asked.append((list(input_ids), sampling))
        await asyncio.sleep(0)
        if isinstance(said, Exception):
            raise said
        said, reason = said if isinstance(said, tuple) else (said, "stop")
        ids = [*self.tokenizer.encode(said), self.end] if isinstance(said, str) else list(said)
        cut = ids[: sampling.max_new_tokens]
        for count in range(1, len(cut)):
            if on_tokens is not None:
                on_tokens(cut[:count])
                await asyncio.sleep(0)
        self.waiting += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.waiting -= 1
        number = len(self.asked)
        generation = Generation(
            token_ids=np.array(cut, np.int32),
            logprobs=-np.arange(len(cut), dtype=np.float32) / 8 - number,
            versions=np.full(len(cut), number, np.int32),
            finish_reason=reason if cut == ids else "length",
            engine="e",
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            started=0.0,
            finished=1.0,
            request_id=f"r{number}",
        )
        self.answered.append(generation)
        return generation


class Serving:
    """A running server with one session open."""

    def __init__(self, server: SessionServer, session: Session, http: aiohttp.ClientSession) -> None:
        self.store = server.app.store
        self.session = session
        self.http = http
        self.root = server.url
        self.base = f"{server.url}/sessions/{session.id}"

    async def post(self, path: str, body: Any, *, token: str | None = None, **options: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.session.token if token is None else token}"}
        async with self.http.post(f"{self.base}/{path}", json=body, headers=headers, **options) as response:
            return response.status, await response.json()

    async def chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> tuple[int, Any]:
        return await self.post("v1/chat/completions", {"model": "m", "messages": list(messages), **fields})


@contextlib.asynccontextmanager
async def serving(engine: Any, tokenizer: FileTokenizer, **settings: Any) -> AsyncIterator[Serving]:
    family = settings.pop("family", None) or ChatMLFamily(ChatMLConfig())
    options = {name: settings.pop(name) for name in ("max_body", "admin_token") if name in settings}
    store = SessionStore(Codec(family=family, tokenizer=tokenizer, matcher=ToolArgumentsMatcher(ComponentConfig())))
    chosen = {"sampling": Sampling(max_new_tokens=400), **settings}

    def opened(_: Any) -> SessionSettings:
        return SessionSettings(engine=engine, **chosen)

    server = SessionServer(SessionApp(store, settings=opened, **options), sweep_seconds=0.05)
    await server.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Serving(server, store.open(opened({})), http)
    finally:
        await server.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
