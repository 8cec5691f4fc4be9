"""A real agent at work: its process, a session server in the test's event loop, and a scripted policy behind that."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Generation, Sampling
from miles_core.contracts.families import ModelFamily
from miles_core.data.tokenizer import FileTokenizer
from miles_core.data.trajectory import Trajectory
from miles_core.engines.pool import EnginePool
from miles_core.routing.client_side import ClientConnection
from miles_core.routing.wire import Request
from miles_core.runs.audit import audit_trajectory
from miles_core.runs.wire import WireRecord
from miles_core.testing.scripted_policy import ReadPrompt, scripted_policy
from miles_core.testing.stub_engine import StubEngine, stub_engine
from miles_core.tito.export import Identity, all_leaves, export
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.matchers import ToolArgumentsMatcher
from miles_core.tito.server import SessionApp
from miles_core.tito.serving import SessionServer
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.store import SessionStore

MODEL = "policy"
SECONDS = 240.0
"""After which an agent that is still at work is killed. All twelve tests together took 97 s on two shared cores."""


@dataclasses.dataclass(kw_only=True)
class Exchange:
    """One HTTP request of the agent's, and the status that it got (0: it went away first)."""

    method: str
    path: str
    body: bytes
    status: int = 0

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


class Watched(SessionApp):
    """A session server that keeps what it was asked."""

    def __init__(self, store: SessionStore) -> None:
        super().__init__(store, model=MODEL)
        self.exchanges: list[Exchange] = []

    async def __call__(self, request: Request, client: ClientConnection) -> None:
        path = request.path.split("/", 3)[-1]
        exchange = Exchange(method=request.method.decode(), path=path, body=request.body)
        self.exchanges.append(exchange)
        try:
            await super().__call__(request, client)
        finally:
            exchange.status = client.status


class Desk:
    """One session and where it is served; what the engine was asked is in `wire` and `generations`."""

    def __init__(
        self, app: Watched, session: Session, url: str, wire: WireRecord, generations: list[Generation]
    ) -> None:
        self.app = app
        self.session = session
        self.url = f"{url}/sessions/{session.id}"
        self.wire = wire
        self.generations = generations

    @property
    def turns(self) -> list[Exchange]:
        """The requests that asked for a reply."""
        return [e for e in self.app.exchanges if e.path in ("v1/messages", "v1/responses", "v1/chat/completions")]

    def audited(self) -> tuple[Trajectory, ...]:
        """Every branch of the session, after the audit: each generation is in them as the engine gave it, and every
        sampled token trains exactly once."""
        refused = [(e.method, e.path, e.status) for e in self.app.exchanges if e.status >= 400]
        assert refused == []
        found = export(self.session.tree, Identity(prompt_id="p", group_id="g", episode_id="e"), picker=all_leaves)
        self.wire.flush()
        problems = [problem for t in found for problem in audit_trajectory(t, self.wire, policy_version=0)]
        assert problems == []
        held = {turn.request_id for t in found for turn in t.turns}
        assert held == {g.request_id for g in self.generations}
        assert len(self.generations) == len(self.turns)
        assert sum(t.trainable_tokens for t in found) == sum(len(g.token_ids) for g in self.generations)
        return found


@contextlib.asynccontextmanager
async def desk(
    directory: Path,
    tokenizer: FileTokenizer,
    reply: Callable[[ReadPrompt], str],
    family: ModelFamily[Any] | None = None,
) -> AsyncIterator[Desk]:
    """A session behind a server, over an engine that streams what `reply` says, a few tokens an event."""
    wire = WireRecord(directory / "wire.sqlite")
    generations: list[Generation] = []

    def seen(input_ids: Sequence[int], generation: Generation) -> None:
        wire.add(input_ids, generation)
        generations.append(generation)

    stub = StubEngine(scripted_policy(tokenizer, reply))
    stub.stream_interval = 5
    family = family or ChatMLFamily(ChatMLConfig())
    store = SessionStore(Codec(family=family, tokenizer=tokenizer, matcher=ToolArgumentsMatcher(ComponentConfig())))
    app = Watched(store)
    async with stub_engine(stub) as engine:
        pool = EnginePool([engine], on_generation=seen)
        server = SessionServer(app)
        await server.start()
        try:
            session = store.open(SessionSettings(engine=pool, sampling=Sampling(max_new_tokens=4096)))
            yield Desk(app, session, server.url, wire, generations)
        finally:
            await server.close()
            await pool.close()
            wire.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How an agent's process ended; `seconds` of wall time."""

    code: int
    out: str
    err: str
    seconds: float


async def run(
    command: Sequence[str],
    desk: Desk,
    directory: Path,
    environment: Callable[[Desk, Path], Mapping[str, str]],
) -> Run:
    """Run an agent in `directory/work` with a home of its own; whatever it started is gone afterwards."""
    home = directory / "home"
    for path in (home, directory / "work", directory / "tmp"):
        path.mkdir(exist_ok=True)
    bare = {
        "HOME": str(home),
        "PATH": f"{os.environ['MILES_AGENT_CLIENTS']}/bin:{os.environ['PATH']}",
        "TMPDIR": str(directory / "tmp"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "1",
        "DO_NOT_TRACK": "1",
        "HTTPS_PROXY": "http://127.0.0.1:1",  # nobody listens there: whatever is not on this host fails at once
        "NO_PROXY": "127.0.0.1,localhost",
    }
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory / "work",
        env={**bare, **environment(desk, home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert process.returncode is not None
    return Run(code=process.returncode, out=out.decode(), err=err.decode(), seconds=time.monotonic() - begun)
