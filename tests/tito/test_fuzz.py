"""Whatever a client sends is answered by something else than a 500, and leaves the session whole and memory as it was.

Three kinds of requests: JSON of the right shape with anything in it, what schemathesis makes of the server's own
OpenAPI document, and broken bytes on a raw socket. `MILES_FUZZ_SEED` chooses the seed of the last two.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data.tokenizer import FileTokenizer
from tests.support.fuzzing.documented import documented
from tests.support.fuzzing.mutations import Valid, attempt
from tests.support.fuzzing.running import hammer
from tests.support.fuzzing.served import SessionServer, session_server
from tests.support.fuzzing.sockets import whole_requests
from tests.tito.fuzz_table import Run, page
from tests.tito.serving import Engine, serving

SEED = int(os.environ.get("MILES_FUZZ_SEED", "0"))
IN_CI, DOCUMENTED_IN_CI = 2_000, 6
NIGHTLY, DOCUMENTED_NIGHTLY = 96_000, 320
"""Attempts on bytes, and documented requests of every operation; in a night 100,000 together."""
TTL = 5.0
PAGE = Path(__file__).parents[2] / "docs" / "nightly" / "fuzz.md"

PATHS = [
    "v1/chat/completions",
    "v1/responses",
    "v1/messages",
    "v1/messages/count_tokens",
    "inference/v1/generate",
    "export",
]
KEYS = [
    "messages",
    "input",
    "tools",
    "model",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stop",
    "stop_sequences",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "system",
    "instructions",
    "tool_choice",
    "stream_options",
    "text",
    "previous_response_id",
    "leaves",
    "episode_id",
    "token_ids",
    "sampling_params",
]
INNER = [
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
    "call_id",
    "output",
    "tool_use_id",
    "input",
    "thinking",
    "summary",
    "reasoning_content",
    "reasoning",
    "input_schema",
    "parameters",
    "tool_call_id",
]
WORDS = [
    "user",
    "assistant",
    "tool",
    "system",
    "text",
    "message",
    "function",
    "function_call",
    "function_call_output",
    "auto",
    "tool_use",
    "tool_result",
    "thinking",
    "reasoning",
    "input_text",
    "output_text",
    "resp_x",
    "hello",
    "{}",
]
numbers = st.integers(-(2**65), 2**65) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.sampled_from(WORDS) | st.text(max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)
likely = st.builds(
    lambda roles, rest: {
        "messages": [{"role": role, "content": content, **more} for role, content, more in roles],
        "input": [{"role": role, "content": content, **more} for role, content, more in roles],
        "max_tokens": 5,
        **rest,
    },
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "tool", "system"]),
            values,
            st.dictionaries(st.sampled_from(INNER[2:]), values, max_size=2),
        ),
        max_size=4,
    ),
    st.dictionaries(st.sampled_from(KEYS[2:]), values, max_size=2),
)


@pytest.mark.parametrize("tokenizer", [True], indirect=True)
def test_no_request_is_a_server_error(tokenizer: FileTokenizer):
    """Batches of requests on one server: a hypothesis example each."""
    shaped = st.lists(st.tuples(st.sampled_from(PATHS), bodies | likely), min_size=1, max_size=40)

    @settings(max_examples=6, deadline=None)
    @given(requests=shaped)
    def run(requests: list[tuple[str, Any]]) -> None:
        asyncio.run(send(tokenizer, requests))

    run()


async def send(tokenizer: FileTokenizer, requests: list[tuple[str, Any]]) -> None:
    async with serving(Engine(tokenizer, "fine"), tokenizer) as s:
        headers = {"Authorization": f"Bearer {s.session.token}"}
        for path, body in requests:
            data = dumped(body)
            async with s.http.post(f"{s.base}/{path}", data=data, headers=headers) as response:
                answer = await response.read()
                assert response.status in (200, 400, 409), (response.status, path, data, answer)
                if response.status != 200:
                    assert orjson.loads(answer)["error"]["message"]
        assert not s.session.tree.busy
        assert not s.session.running


def dumped(body: Any) -> bytes:
    import json

    return json.dumps(body).encode("utf-8", "surrogatepass")


async def test_hostile_paths_and_headers(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "fine"), tokenizer) as s, aiohttp.ClientSession() as http:
        for path in (
            "",
            "sessions",
            "sessions/",
            "sessions//v1/models",
            "sessions/../x",
            "v1/models",
            "sessions/x/y/z",
        ):
            for method in ("GET", "POST", "PUT", "DELETE"):
                async with http.request(method, f"{s.root}/{path}") as response:
                    assert response.status in (201, 400, 401, 404), (method, path)
        for token in ("é" * 5, "x" * 5000, " "):
            headers = {"x-api-key": token, "content-type": "x"}
            async with http.post(f"{s.base}/v1/messages", data=b"{}", headers=headers) as response:
                assert response.status == 401


@pytest.fixture
def server(make_tokenizer: Callable[..., Path], tmp_path: Path) -> Iterator[SessionServer]:
    """A session server in a process of its own."""
    print(f"MILES_FUZZ_SEED={SEED}")
    with session_server(make_tokenizer(tmp_path, tags=True), tmp_path / "log", ttl=TTL) as found:
        yield found


def test_bytes_that_are_hardly_requests(server: SessionServer):
    outcome = hammer(server.address, server.renew, seed=SEED, numbers=range(IN_CI))
    assert outcome.wrong == []
    assert server.tracebacks() == []
    assert len(outcome.kinds) == 13
    assert outcome.statuses.keys() >= {200, 400, 401, 404}  # the attempts meet the server, not only its parser
    status, _ = server.ask("POST", server.renew()[0].path, server.valid[0].body, **server.headers)
    assert status == 200


def test_answers_are_as_the_document_says(server: SessionServer):
    statuses = documented(server, DOCUMENTED_IN_CI, seed=SEED)
    assert statuses.keys() >= {200, 201, 400, 401, 404}
    assert server.tracebacks() == []


def test_a_server_that_fails_is_found():
    """The harness, on a server that answers some requests with 500 and others not at all."""
    import contextlib
    import socket
    import threading

    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            for number in range(1_000):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    status = b"500 Oh" if number % 2 else b"200 OK"
                    connection.sendall(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status)

    threading.Thread(target=serve, daemon=True).start()
    valid = [Valid("GET", "/health")]
    outcome = hammer(listening.getsockname(), lambda: valid, seed=1, numbers=range(30))
    listening.close()
    assert any("answered [500]" in wrong for wrong in outcome.wrong)


def test_attempts_are_a_pure_function_of_seed_and_number():
    valid = [Valid("POST", "/x", (), {"a": [1, {"b": "c"}]})]
    assert [attempt(3, n, valid) for n in range(50)] == [attempt(3, n, valid) for n in range(50)]
    assert {whole_requests(attempt(3, n, valid).data) for n in range(300)} >= {0, 1, 2}


@pytest.mark.nightly
def test_a_hundred_thousand_requests(server: SessionServer):
    """Memory is compared from a quarter of the way on, when every path has been used, to the end, when every session
    has ended."""
    begin, early = time.monotonic(), NIGHTLY // 4
    warm = hammer(server.address, server.renew, seed=SEED, numbers=range(early))
    before = rested(server)
    rest = hammer(server.address, server.renew, seed=SEED, numbers=range(early, NIGHTLY))
    after = rested(server)
    shaped = documented(server, DOCUMENTED_NIGHTLY, seed=SEED)
    run = Run(
        statuses={"bytes": warm.statuses + rest.statuses, "documented": shaped},
        attempts={"bytes": NIGHTLY, "documented": sum(shaped.values())},
        unanswered=warm.unanswered + rest.unanswered,
        before=before,
        after=after,
        last=rested(server),
        seconds=time.monotonic() - begin,
        seed=SEED,
    )
    PAGE.write_text(page(run))
    assert warm.wrong + rest.wrong == []
    assert server.tracebacks() == []
    assert sum(run.attempts.values()) >= 100_000
    assert after < before + 32, "memory grew with requests whose sessions had ended"


def rested(server: SessionServer) -> float:
    """MiB resident once every session but those of `renew` has expired."""
    server.renew()
    time.sleep(TTL + 6)
    assert server.ask("GET", "/health")[1]["sessions"] <= 2
    return server.resident_mib()
