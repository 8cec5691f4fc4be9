"""The session server: who may, what fails, what races; and that nothing but finished turns is ever recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from miles_core.data.tokenizer import FileTokenizer
from miles_core.errors import EngineError, EngineRefusal, EngineUnavailable
from miles_core.tito.export import Identity, all_leaves, export, from_ipc
from tests.tito.serving import Engine, Serving, serving, user

ASK = [user("hello")]
NAMES = Identity(prompt_id="p", group_id="g", episode_id="e")


def trace(s: Serving) -> tuple[Any, ...]:
    """All that a session holds."""
    return s.session.tree.nodes, s.session.tree.tokens, s.session.tree.busy, len(s.session.tree._roots)


async def test_turns_extend_exactly_what_was_sampled(tokenizer: FileTokenizer):
    """Ids that decode and encode again to others (he+llo) stay as they were sampled."""
    he, llo = tokenizer.encode("he"), tokenizer.encode("llo")
    engine = Engine(tokenizer)
    engine.script = [[*he, *llo, engine.end], "second"]
    assert tokenizer.encode("hello") != [*he, *llo]
    async with serving(engine, tokenizer) as s:
        _, first = await s.chat(ASK)
        reply = first["choices"][0]["message"]
        assert reply["content"] == "hello"
        status, _ = await s.chat([*ASK, reply, user("more")])
        assert status == 200
        (trajectory,) = export(s.session.tree, NAMES)
    prompt, sampled = engine.asked[0][0], engine.answered[0].token_ids.tolist()
    assert engine.asked[1][0][: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert trajectory.token_ids.tolist() == [*engine.asked[1][0], *engine.answered[1].token_ids.tolist()]
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == [i for g in engine.answered for i in g.token_ids]
    assert trajectory.logprobs[trajectory.loss_mask].tolist() == [x for g in engine.answered for x in g.logprobs]
    assert [t.request_id for t in trajectory.turns] == ["r1", "r2"]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(EngineUnavailable("gone"), 503), (EngineError("broken"), 502), (EngineRefusal("too long"), 400)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_turn_leaves_no_trace(tokenizer: FileTokenizer, failure: Exception, status: int, stream: bool):
    async with serving(Engine(tokenizer, failure, "fine"), tokenizer) as s:
        before = trace(s)
        assert (await s.chat(ASK, stream=stream))[0] == status
        assert trace(s) == before
        assert (await s.chat(ASK))[0] == 200
        assert s.session.tree.nodes == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_turn(tokenizer: FileTokenizer, stream: bool):
    engine = Engine(tokenizer, "a long answer")
    engine.gate = asyncio.Event()
    async with serving(engine, tokenizer) as s:
        before = trace(s)
        asking = asyncio.create_task(s.chat(ASK, stream=stream))
        await until(lambda: engine.waiting == 1)
        asking.cancel()
        await until(lambda: engine.waiting == 0)
        await until(lambda: not s.session.running)
        assert trace(s) == before


@pytest.mark.parametrize(("mode", "statuses"), [("branching", [200, 200]), ("linear", [200, 409])])
async def test_racing_turns(tokenizer: FileTokenizer, mode: Any, statuses: list[int]):
    engine = Engine(tokenizer, "one", "two")
    engine.gate = asyncio.Event()
    async with serving(engine, tokenizer, mode=mode) as s:
        racing = [asyncio.create_task(s.chat(ASK)) for _ in range(2)]
        await until(lambda: engine.waiting == statuses.count(200))
        await asyncio.sleep(0.05)
        engine.gate.set()
        answers = await asyncio.gather(*racing)
        assert sorted(status for status, _ in answers) == statuses
        given = sorted(a["choices"][0]["message"]["content"] for status, a in answers if status == 200)
        kept = export(s.session.tree, NAMES, picker=all_leaves)
        assert given == sorted(said(t, tokenizer) for t in kept)
        seeds = [sampling.seed for _, sampling in engine.asked]
    assert len(seeds) == statuses.count(200)


def said(trajectory: Any, tokenizer: FileTokenizer) -> str:
    return tokenizer.decode(trajectory.token_ids[trajectory.loss_mask].tolist(), skip_special=True)


async def test_turns_and_attempts_have_seeds_of_their_own(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "one")
    async with serving(engine, tokenizer, turn_seed=lambda turn: 100 + turn, locked=True) as s:
        _, first = await s.chat(ASK, seed=5, temperature=0.1)
        await s.chat([*ASK, first["choices"][0]["message"], user("x")])
        await s.chat(ASK)
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert seeds[:2] == [100, 101]
    assert seeds[2] not in (100, 101)
    assert {sampling.temperature for _, sampling in engine.asked} == {1.0}  # the run's, not the client's


async def test_deleting_while_a_turn_runs(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "never")
    engine.gate = asyncio.Event()
    async with serving(engine, tokenizer) as s:
        asking = asyncio.create_task(s.chat(ASK))
        await until(lambda: engine.waiting == 1)
        headers = {"Authorization": f"Bearer {s.session.token}"}
        async with s.http.delete(s.base, headers=headers) as response:
            assert response.status == 200
        assert (await asking)[0] == 404
        assert engine.waiting == 0
        assert (await s.chat(ASK))[0] == 404


async def test_sessions_expire_and_running_ones_do_not(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "slow")
    engine.gate = asyncio.Event()
    async with serving(engine, tokenizer, ttl=0.1) as s:
        asking = asyncio.create_task(s.chat(ASK))
        await asyncio.sleep(0.3)
        engine.gate.set()
        assert (await asking)[0] == 200
        await until(lambda: len(s.store) == 0)
        assert (await s.chat(ASK))[0] == 404


async def test_whose_token(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "x"), tokenizer, admin_token="admin") as s:
        other = s.store.open(s.session.settings)
        body = {"model": "m", "messages": ASK}
        for token, status in (("", 401), ("nonsense", 401), (other.token, 403), ("admin", 401)):
            assert (await s.post("v1/chat/completions", body, token=token))[0] == status
        assert (await s.post("export", {}, token=other.token))[0] == 403
        assert s.session.tree.nodes == 0
        for headers in ({"x-api-key": s.session.token}, {"authorization": f"bearer {s.session.token}"}):
            async with s.http.post(f"{s.base}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
        async with s.http.post(f"{s.root}/sessions", json={}) as response:
            assert response.status == 401
        async with s.http.post(f"{s.root}/sessions", json={}, headers={"Authorization": "Bearer admin"}) as response:
            opened = await response.json()
        assert response.status == 201
        async with s.http.get(opened["base_url"], headers={"Authorization": "Bearer admin"}) as response:
            assert (await response.json())["turns"] == 0


async def test_a_header_addresses_a_session(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "x"), tokenizer) as s:
        headers = {"Authorization": f"Bearer {s.session.token}", "X-Session-ID": s.session.id}
        body = {"model": "m", "messages": ASK}
        async with s.http.post(f"{s.root}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
        async with s.http.get(f"{s.root}/v1/models", headers=headers) as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["policy"]
        async with s.http.get(f"{s.root}/v1/models") as response:
            assert response.status == 404
        async with s.http.get(f"{s.root}/health") as response:
            assert await response.json() == {"status": "ok", "sessions": 1}


async def test_bodies_over_the_limit(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "x"), tokenizer, max_body=1000) as s:
        assert (await s.chat([user("x" * 2000)]))[0] == 413

        async def chunks():
            for _ in range(10):
                yield b"x" * 200

        headers = {"Authorization": f"Bearer {s.session.token}"}
        async with s.http.post(f"{s.base}/v1/messages", data=chunks(), headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"]["type"] == "request_too_large"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "x"},
        {"messages": [user("x"), {"role": "assistant", "content": "y"}]},
        {"messages": [{"role": "judge", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": "y"}, user("x")]},
        {"messages": ASK, "n": 2},
        {"messages": ASK, "logit_bias": {"5": 1}},
        {"messages": ASK, "input_ids": [1]},
        {"messages": ASK, "temperature": -1},
        {"messages": ASK, "temperature": "hot"},
        {"messages": ASK, "max_tokens": 0},
        {"messages": ASK, "stop": [""]},
        {"messages": ASK, "response_format": {"type": "json_object"}},
        {"messages": ASK, "tools": [{"function": {"name": "f"}}], "tool_choice": "required"},
        {"messages": ASK, "tools": [3]},
        {"messages": ASK, "stream": "yes"},
    ],
)
async def test_what_cannot_be_answered_is_a_400_that_says_why(tokenizer: FileTokenizer, body: dict[str, Any]):
    engine = Engine(tokenizer, "x")
    async with serving(engine, tokenizer) as s:
        status, answer = await s.post("v1/chat/completions", body)
        assert status == 400
        assert len(answer["error"]["message"]) > 10
        assert not engine.asked
        assert trace(s) == (0, 0, False, 0)


async def test_harmless_unknown_fields_are_ignored(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "x"), tokenizer) as s:
        fields = {"user": "me", "store": True, "logit_bias": {}, "n": 1, "presence_penalty": 0, "service_tier": "auto"}
        assert (await s.chat(ASK, **fields))[0] == 200


async def test_limits_of_tokens(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "0123456789" * 5)
    async with serving(engine, tokenizer, max_tokens=60) as s:
        _, first = await s.chat(ASK, max_tokens=10)
        assert first["choices"][0]["finish_reason"] == "length"
        assert first["usage"]["completion_tokens"] == 10
        assert (await s.chat([*ASK, first["choices"][0]["message"], user("x")]))[0] == 409
        _, second = await s.chat(ASK)
        assert second["usage"]["total_tokens"] == 60
        status, answer = await s.chat([user("x" * 100)])
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert s.session.full


async def test_stop_strings_end_the_text_and_not_the_tokens(tokenizer: FileTokenizer):
    engine = Engine(tokenizer)
    engine.script = [tokenizer.encode("one STOP")]
    async with serving(engine, tokenizer) as s:
        _, answer = await s.chat(ASK, stop="STOP")
        assert answer["choices"][0]["message"]["content"] == "one "
        (trajectory,) = export(s.session.tree, NAMES)
        assert said(trajectory, tokenizer) == "one STOP"
        status, _ = await s.chat([*ASK, answer["choices"][0]["message"], user("x")])
        assert status == 200
        assert s.session.tree.leaves()[0].turns == 2


async def test_an_aborted_generation_is_taken_up_where_it_stopped(tokenizer: FileTokenizer):
    """New weights arrive in the middle: versions mix inside one turn, and no token is lost or sampled twice."""
    a, b, c = (tokenizer.encode(text) for text in ("ab", "", "cd"))
    engine = Engine(tokenizer)
    engine.script = [(a, "abort"), (b, "abort"), ([*c, engine.end], "stop")]
    async with serving(engine, tokenizer) as s:
        _, answer = await s.chat(ASK)
        assert answer["choices"][0]["message"]["content"] == "abcd"
        (trajectory,) = export(s.session.tree, NAMES)
    assert trajectory.versions[trajectory.loss_mask].tolist() == [1] * len(a) + [3] * (len(c) + 1)
    assert engine.asked[2][0] == [*engine.asked[0][0], *a]
    assert [t.request_id for t in trajectory.turns] == ["r1", "r2", "r3"]
    assert trajectory.oldest_version == 1


async def test_streams_carry_tokens_as_they_come_and_end_like_the_whole(tokenizer: FileTokenizer):
    engine = Engine(
        tokenizer, "some words 中é and more", 'x\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )
    engine.gate = asyncio.Event()
    async with serving(engine, tokenizer) as s:
        headers = {"Authorization": f"Bearer {s.session.token}"}
        body = {"model": "m", "messages": ASK, "stream": True}
        async with s.http.post(f"{s.base}/v1/chat/completions", json=body, headers=headers) as response:
            early = b""
            while early.count(b"data: ") < 10:
                early += await response.content.readany()
            assert not engine.answered
            engine.gate.set()
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert content_of(early + rest) == "some words 中é and more"
        engine.gate = None
        _, whole = await s.post("v1/chat/completions", {"model": "m", "messages": [user("tool")]})
        assert whole["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def content_of(events: bytes) -> str:
    chunks = [orjson.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


async def test_a_stream_that_another_engine_begins_again_is_an_error(tokenizer: FileTokenizer):
    class Moved(Engine):
        async def generate(self, input_ids, sampling, *, routing_key="", priority=0, on_tokens=None):
            on_tokens(self.tokenizer.encode("first words"))
            await asyncio.sleep(0.05)
            return await super().generate(input_ids, sampling, on_tokens=on_tokens)

    async with serving(Moved(tokenizer, "other words"), tokenizer) as s:
        before = trace(s)
        headers = {"Authorization": f"Bearer {s.session.token}"}
        body = {"model": "m", "messages": ASK, "stream": True}
        async with s.http.post(f"{s.base}/v1/chat/completions", json=body, headers=headers) as response:
            events = await response.read()
        assert b"no longer begins" in events
        assert b"[DONE]" not in events
        assert trace(s) == before


async def test_export_over_http_is_columnar_and_exact(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "a", "b"), tokenizer) as s:
        await s.chat(ASK)
        await s.chat([user("other")])
        headers = {"Authorization": f"Bearer {s.session.token}"}
        async with s.http.post(f"{s.base}/export", json={"episode_id": "e"}, headers=headers) as response:
            received = from_ipc(await response.read())
        assert response.headers["content-type"] == "application/vnd.apache.arrow.stream"
    for got, kept in zip(received, export(s.session.tree, NAMES), strict=True):
        assert got.trajectory_id == kept.trajectory_id
        for column in ("token_ids", "loss_mask", "logprobs", "versions"):
            assert (getattr(got, column) == getattr(kept, column)).all()
        assert got.turns == kept.turns


async def test_changed_tools_make_another_root(tokenizer: FileTokenizer):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with serving(Engine(tokenizer, "a"), tokenizer) as s:
        _, first = await s.chat(ASK)
        await s.chat([*ASK, first["choices"][0]["message"], user("x")], tools=[tool])
        assert [leaf.turns for leaf in s.session.tree.leaves()] == [1, 1]


async def test_a_lone_stop_token_and_nothing_at_all(tokenizer: FileTokenizer):
    engine = Engine(tokenizer)
    engine.script = [[engine.end], [], "x"]
    async with serving(engine, tokenizer) as s:
        messages = list(ASK)
        for _ in range(3):
            _, answer = await s.chat(messages)
            messages += [answer["choices"][0]["message"], user("again")]
        (trajectory,) = export(s.session.tree, NAMES)
    assert [t.stop - t.start for t in trajectory.turns] == [1, 0, 2]
    assert trajectory.trainable_tokens == 3


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_constrained_output_is_refused_and_an_effort_is_not(tokenizer: FileTokenizer):
    """What Claude Code sends in `output_config`: an effort always, a schema that nobody would enforce sometimes."""
    body = {"model": "m", "messages": ASK, "max_tokens": 50}
    async with serving(Engine(tokenizer, "x"), tokenizer) as s:
        status, _ = await s.post("v1/messages", {**body, "output_config": {"effort": "high", "format": None}})
        assert status == 200
        schema = {"type": "json_schema", "schema": {"type": "object"}}
        status, answer = await s.post("v1/messages", {**body, "output_config": {"format": schema}})
        assert (status, s.session.tree.nodes) == (400, 1)
        assert "output_config.format" in answer["error"]["message"]


@pytest.mark.parametrize("kind", [[], {}, 3, None, "image"])
async def test_an_item_of_no_known_type_is_a_400(tokenizer: FileTokenizer, kind: Any):
    async with serving(Engine(tokenizer, "x"), tokenizer) as s:
        body = {"model": "m", "input": [{"type": kind, "role": "user", "content": "hello"}]}
        status, answer = await s.post("v1/responses", body)
    assert status == 400
    assert "input[0]" in answer["error"]["message"]


async def test_events_of_a_reply_that_comes_at_once_are_numbered_in_order(tokenizer: FileTokenizer):
    engine = Engine(tokenizer)
    engine.script = [[engine.end]]
    async with serving(engine, tokenizer) as s:
        headers = {"Authorization": f"Bearer {s.session.token}"}
        body = {"model": "m", "input": "hello", "stream": True}
        async with s.http.post(f"{s.base}/v1/responses", json=body, headers=headers) as response:
            events = (await response.read()).split(b"\n\n")
    numbers = [orjson.loads(event.partition(b"data: ")[2])["sequence_number"] for event in events if event]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 3


async def test_how_a_history_is_written_changes_no_prompt(tokenizer: FileTokenizer):
    """Written alike each time, its repeated part is not parsed; with other white space each time it always is."""
    asked = []
    for alike in (True, False):
        engine = Engine(tokenizer, "one", "two", "three", "four", "five", "six")
        async with serving(engine, tokenizer) as s:
            headers = {"Authorization": f"Bearer {s.session.token}"}
            messages, kept = [user('é "messages":[')], []
            for number in range(6):
                if number == 4:
                    messages = [*kept[1][:-1], user("another way")]  # a branch behind the first answer
                space = " " * (0 if alike else number + 1)
                data = f'{{"messages":[{space}{orjson.dumps(messages).decode()[1:-1]}],"model":"m"}}'.encode()
                async with s.http.post(f"{s.base}/v1/chat/completions", data=data, headers=headers) as response:
                    assert response.status == 200
                    answer = await response.json()
                kept.append(messages)
                messages = [*messages, answer["choices"][0]["message"], user(f"more {number}")]
            assert [leaf.turns for leaf in s.session.tree.leaves()] == [4, 3]
        asked.append([ids for ids, _ in engine.asked])
    assert asked[0] == asked[1]
