"""A stub engine: the wire protocol without a model, for speed and fault tests.

It answers `/generate` from a script, holds weights by checksum as an engine would, and can be told to misbehave.
It never stands in for the embedded engine where numbers matter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from miles_core.data.checksums import checksum
from miles_core.testing.serving import served
from miles_core.testing.stub_updates import StubUpdates

__all__ = ["Script", "ServedStub", "StubEngine", "hashed_script", "served_stub", "stub_engine"]

Script = Callable[[Sequence[int], dict[str, Any]], Sequence[int]]
"""(input ids, sampling params) → output ids. `max_new_tokens` is applied by the engine."""


def hashed_script(vocabulary: int, length: int) -> Script:
    """Ids that are a pure function of the input and the seed: `length` of them, in 0 to vocabulary − 1."""

    def script(input_ids: Sequence[int], params: dict[str, Any]) -> Sequence[int]:
        generator = np.random.default_rng([*input_ids, int(params.get("sampling_seed") or 0)])
        ids: list[int] = generator.integers(0, vocabulary, length).tolist()
        return ids

    return script


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StubEngine:
    """State of one stub engine. Tests read and set its public attributes while it serves."""

    def __init__(
        self, script: Script, *, latency: float = 0.0, version: int = 0, vocabulary: int | None = None
    ) -> None:
        self.script = script
        self.vocabulary = vocabulary
        """Ids from this one on are refused with 400; None takes them all."""
        self.latency = latency
        self.version = version
        self.weights: dict[str, str] = {}
        self.staged: tuple[int, dict[str, str]] | None = None
        self.requests: list[dict[str, Any]] = []
        self.stream_interval = 0
        """Sampled tokens between two events of a stream; 0: the whole answer is one event."""
        self.stream_latency = 0.0
        """Seconds behind each event of a stream."""
        self.refuse_with: int | None = None
        """Status to answer `/generate` with."""
        self.garbage = False
        """Answer `/generate` with JSON that is no generation."""
        self.hang = False
        """Take requests and never answer."""
        self.data_parallel = 1
        """Ranks that it says it has."""
        self.gone = False
        """Close every connection without an answer, as the host of an ended process does."""
        self.corrupt_staging = False
        """Report a wrong checksum for the first staged tensor."""
        self.calls: list[str] = []
        """Paths of the POST requests so far."""
        self.on_call: Callable[[str], Awaitable[None]] | None = None
        """Awaited with the path before a POST request is looked at; what it raises is the answer (500, or the status of
        an `aiohttp.web` exception)."""
        self.aborted: set[str] = set()
        self.updates = StubUpdates(self)
        self._running = asyncio.Event()
        self._running.set()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._unless_gone])
        routes = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._ok,
            "/stage_weights": self._stage,
            "/commit_weights": self._commit,
            "/switch_weights": self._switch,
            "/discard_weights": self._discard,
            "/weights_checker": self._check,
            **self.updates.routes(),
        }
        routes = {path: self._told(path, handler) for path, handler in routes.items()}
        app.add_routes([web.post(path, handler) for path, handler in routes.items()])
        app.add_routes([web.get("/health", self._ok), web.get("/server_info", self._info)])
        return app

    @web.middleware
    async def _unless_gone(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.gone and request.transport is not None:
            request.transport.abort()
        return await handler(request)

    def _told(self, path: str, handler: Handler) -> Handler:
        """Note the call, and let `on_call` fail or delay it first."""

        async def told(request: web.Request) -> web.StreamResponse:
            self.calls.append(path)
            if self.on_call is not None:
                await self.on_call(path)
            return await handler(request)

        return told

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        asked = _one_each(body)
        self.requests += asked
        if self.refuse_with is not None:
            return web.json_response({"error": {"message": "refused by the test"}}, status=self.refuse_with)
        if self.vocabulary is not None:
            outside = [i for one in asked for i in one["input_ids"] if not 0 <= i < self.vocabulary]
            if outside:
                refusal = {"error": {"message": f"id {outside[0]} is outside the vocabulary"}}
                return web.json_response(refusal, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body.get("stream"):
            await response.prepare(request)
        if self.hang:
            await asyncio.Event().wait()
        await self._running.wait()
        if self.latency:
            await asyncio.sleep(self.latency)
        answers = [{"nonsense": True} if self.garbage else self._answer(one) for one in asked]
        if not body.get("stream"):
            return web.json_response(answers if isinstance(body["rid"], list) else answers[0])
        for answer in answers:
            for part in (*_parts(answer, self.stream_interval), answer):
                await response.write(b"data: " + orjson.dumps(part) + b"\n\n")
                if self.stream_latency:
                    await asyncio.sleep(self.stream_latency)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body.get("sampling_params") or {}
        limit = int(params.get("max_new_tokens", 16))
        wanted = list(self.script(body["input_ids"], params))
        ids = wanted[:limit]
        finish: dict[str, Any] = {"type": "length", "length": limit}
        if len(wanted) <= limit:
            finish = {"type": "stop", "matched": ids[-1] if ids else None}
        if body["rid"] in self.aborted:
            finish = {"type": "abort", "message": "aborted"}
        return {
            "output_ids": ids,
            "text": "",
            "meta_info": {
                "id": body["rid"],
                "finish_reason": finish,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "weight_version": str(self.version),
                "weight_versions": [{"version": str(self.version), "start": 0, "end": len(ids)}],
                "output_token_logprobs": [[-1.0 - (i % 7) / 8, i, None] for i in ids],
            },
        }

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json()).get("rid", ""))
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        self._running.clear()
        return web.json_response({"success": True})

    async def _continue(self, request: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"success": True})

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"version": "stub", "weight_version": str(self.version), "dp_size": self.data_parallel}
        )

    async def _stage(self, request: web.Request) -> web.Response:
        body = await request.json()
        found = _read_checksums(Path(body["path"]), body["tensors"])
        if self.corrupt_staging and found:
            found[next(iter(found))] = "0" * 32
        wrong = [t["name"] for t in body["tensors"] if found[t["name"]] != t["checksum"]]
        if wrong and not self.corrupt_staging:
            return web.json_response({"error": {"message": f"checksum of {wrong[0]}"}}, status=409)
        self.staged = (int(body["weight_version"]), found)
        return web.json_response({"success": True, "checksums": found})

    async def _commit(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.staged is None or self.staged[0] != int(body["weight_version"]):
            return web.json_response({"error": {"message": "nothing staged under that version"}}, status=409)
        self.version, self.weights = self.staged
        self.staged = None
        return web.json_response({"success": True})

    async def _switch(self, request: web.Request) -> web.Response:
        answer = await self._commit(request)
        return await self._check(request) if answer.status == 200 else answer

    async def _discard(self, request: web.Request) -> web.Response:
        self.staged = None
        return web.json_response({"success": True})

    async def _check(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "checksums": self.weights, "weight_version": str(self.version)})


def _one_each(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests of a body, which may be a batch: every list in it then has one value a prompt."""
    if not isinstance(body["input_ids"][0], list):
        return [body]
    return [
        {key: value[index] if isinstance(value, list) else value for key, value in body.items()}
        for index in range(len(body["input_ids"]))
    ]


def _parts(answer: dict[str, Any], interval: int) -> Iterator[dict[str, Any]]:
    """The unfinished answers of a stream: cumulative ids, no finish reason."""
    ids = answer.get("output_ids", [])
    for count in range(interval, len(ids), interval) if interval else ():
        meta = {**answer["meta_info"], "finish_reason": None, "completion_tokens": count}
        yield {**answer, "output_ids": ids[:count], "meta_info": meta}


def _read_checksums(path: Path, tensors: Sequence[dict[str, Any]]) -> dict[str, str]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return {t["name"]: checksum(view[t["offset"] : t["offset"] + t["nbytes"]]) for t in tensors}


@asynccontextmanager
async def stub_engine(engine: StubEngine) -> AsyncIterator[str]:
    """Serve it on a free loopback port; yields its base URL."""
    runner = web.AppRunner(engine.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedStub:
    """A stub engine and where it is served."""

    engine: StubEngine
    url: str


@contextmanager
def served_stub(engine: StubEngine) -> Iterator[ServedStub]:
    """Serve it from a thread, for tests that are not coroutines."""
    with served(engine.application) as url:
        yield ServedStub(engine=engine, url=url)
