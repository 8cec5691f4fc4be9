"""Whatever a client sends is answered by something else than a 500, and leaves the session whole."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data.tokenizer import FileTokenizer
from tests.tito.serving import Engine, serving

PATHS = ["v1/chat/completions", "v1/responses", "v1/messages", "v1/messages/count_tokens", "export"]
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


@pytest.mark.parametrize("kind", ["shaped", "bytes"])
def test_no_request_is_a_server_error(tokenizer: FileTokenizer, kind: str):
    """Batches of requests on one server: a hypothesis example each."""
    shaped = st.lists(st.tuples(st.sampled_from(PATHS), bodies | likely), min_size=1, max_size=40)
    raw = st.lists(st.tuples(st.sampled_from(PATHS), st.binary(max_size=60)), min_size=1, max_size=40)

    @settings(max_examples=10, deadline=None)
    @given(requests=shaped if kind == "shaped" else raw)
    def run(requests: list[tuple[str, Any]]) -> None:
        asyncio.run(send(tokenizer, requests))

    run()


async def send(tokenizer: FileTokenizer, requests: list[tuple[str, Any]]) -> None:
    async with serving(Engine(tokenizer, "fine"), tokenizer) as s:
        headers = {"Authorization": f"Bearer {s.session.token}"}
        for path, body in requests:
            data = body if isinstance(body, bytes) else dumped(body)
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
