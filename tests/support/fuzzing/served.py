"""Servers as users run them, each a process of its own: what they answered, what they wrote, what memory they hold."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from miles_core.testing.stub_engine import StubEngine, served_stub
from tests.support.fuzzing.mutations import Valid

__all__ = ["Served", "SessionServer", "router", "session_server"]


class Served:
    """A running `miles serve …`; what it writes to its standard error is in `log`."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    def resident_mib(self) -> float:
        """What the kernel counts as its resident memory (proc(5))."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def tracebacks(self) -> list[str]:
        """Exceptions that nobody handled, a line each."""
        text = self.log.read_text(errors="replace")
        found = [block.splitlines() for block in text.split("Traceback (most recent call last):\n")[1:]]
        ends = [next((line for line in block if line and not line.startswith(" ")), "") for block in found]
        never = [line for line in text.splitlines() if "never retrieved" in line or "never awaited" in line]
        return ends + never

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One plain request; status and JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@contextlib.contextmanager
def _process(log: Path, *arguments: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "miles_core.cli.main", "serve", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as written:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True, env=environment)
        try:
            assert process.stdout is not None
            yield Served(process, json.loads(process.stdout.readline())["url"], log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            process.stdout.close()


class SessionServer(Served):
    """A session server; `valid` are requests that it answers, to a session that is open now."""

    valid: Sequence[Valid]
    session: str = ""
    headers: dict[str, str]

    def renew(self) -> Sequence[Valid]:
        """End the session there was, and open another one, and one more for a request that ends it; `valid`."""
        if self.session:
            self.ask("DELETE", f"/sessions/{self.session}", **self.headers)
        opened, doomed = (self.ask("POST", "/sessions", {})[1] for _ in range(2))
        self.session = opened["id"]
        self.headers = {"Authorization": f"Bearer {opened['token']}"}
        self.valid = _requests(opened, doomed)
        return self.valid


def _requests(opened: dict[str, str], doomed: dict[str, str]) -> list[Valid]:
    key = (("authorization", f"Bearer {opened['token']}"), ("content-type", "application/json"))
    below = f"/sessions/{opened['id']}"
    said = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        *said,
        {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat_tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "seed": 3}
    chat = {"model": "m", "messages": said, "max_tokens": 9, "stop": ["z"], **sampling}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "y"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    responses_tools = [
        {"type": "function", "name": "f", "parameters": schema},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ]
    blocks = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "y", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}],
        },
    ]
    messages = {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be"}], "messages": blocks}
    tokens = {"model": "m", "token_ids": [65, 66, 67], "sampling_params": {"max_tokens": 9, "logprobs": 1, **sampling}}

    def post(path: str, body: Any) -> Valid:
        return Valid("POST", f"{below}/{path}", key, body)

    by_header = (*key, ("x-session-id", opened["id"]))
    doomed_key = (("x-api-key", doomed["token"]),)
    return [
        post("v1/chat/completions", chat),
        post("v1/chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}}),
        post("v1/chat/completions", {"messages": history, "tools": [chat_tool], "tool_choice": "auto"}),
        post("v1/responses", {"model": "m", "input": items, "tools": responses_tools, "instructions": "be"}),
        post("v1/responses", {"model": "m", "input": "hello", "stream": True, "max_output_tokens": 9}),
        post("v1/messages", {**messages, "tools": [{"name": "f", "input_schema": schema}], "stop_sequences": ["z"]}),
        post("v1/messages?beta=true", {**messages, "stream": True}),
        post("v1/messages/count_tokens", messages),
        post("inference/v1/generate", tokens),
        post("export", {"leaves": "all", "episode_id": "e", "max_tokens": 50}),
        Valid("POST", "/v1/chat/completions", by_header, chat),
        Valid("POST", "/sessions", (), {}),
        Valid("GET", below, key),
        Valid("GET", f"{below}/v1/models", key),
        Valid("GET", "/v1/models", by_header),
        Valid("GET", "/health"),
        Valid("GET", "/openapi.json"),
        Valid("DELETE", f"/sessions/{doomed['id']}", doomed_key),
    ]


@contextlib.contextmanager
def session_server(tokenizer: Path, log: Path, *, ttl: float = 3600.0) -> Iterator[SessionServer]:
    """A session server over a stub engine that says a few bytes and ends the turn."""
    engine = StubEngine(lambda ids, params: [72 + len(ids) % 3, 105, 33])
    options = ("--tokenizer", str(tokenizer), "--ttl", str(ttl), "--max-new-tokens", "50")
    with (
        served_stub(engine) as stub,
        _process(log, "sessions", "--engine", stub.url, "--family", "chatml", *options) as plain,
    ):
        server = SessionServer(plain.process, plain.url, log)
        server.renew()
        yield server


class _Checking(StubEngine):
    """Refuses what is no request, as an engine does."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            orjson.dumps(self._answer(orjson.loads(await request.read())))
        except Exception as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        return await super()._generate(request)

    async def _abort(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})


@contextlib.contextmanager
def router(log: Path) -> Iterator[tuple[Served, Sequence[Valid]]]:
    """A router over a stub engine, and requests that it answers."""
    engine = _Checking(lambda ids, params: [65, 66])
    body = {"rid": "r", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
    key = (("x-smg-routing-key", "s"), ("content-type", "application/json"))
    valid = [
        Valid("POST", "/generate", key, body),
        Valid("POST", "/generate", key, {**body, "stream": True}),
        Valid("POST", "/abort_request", key, {"rid": "r"}),
        Valid("GET", "/health"),
        Valid("GET", "/server_info"),
        Valid("GET", "/router/engines"),
        Valid("GET", "/router/sessions?key=s"),
        Valid("POST", "/router/engines", (), {"url": "nowhere"}),
        Valid("DELETE", "/router/engines?url=nowhere"),
    ]
    with served_stub(engine) as stub, _process(log, "router", "--engine", stub.url, "--deadline", "5") as server:
        yield server, valid
