"""Tokens in, tokens out: turns of clients that render messages themselves are a session's turns like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_core.data.tokenizer import FileTokenizer
from miles_core.errors import EngineError
from miles_core.runs.audit import audit_trajectory
from miles_core.runs.wire import WireRecord
from miles_core.tito.export import Identity, all_leaves, export
from tests.tito.serving import Engine, Serving, serving, user

NAMES = Identity(prompt_id="p", group_id="g", episode_id="e")
PROMPT = [65, 66, 67]
pytestmark = pytest.mark.parametrize("tokenizer", [True], indirect=True)


async def generate(s: Serving, ids: list[int], **params: Any) -> tuple[int, Any]:
    return await s.post("inference/v1/generate", {"model": "m", "token_ids": ids, "sampling_params": params})


async def test_the_answer_is_what_the_engine_sampled(tokenizer: FileTokenizer):
    """As the clients of that endpoint read it: ids, and their log-probs under `token_id:ID`."""
    engine = Engine(tokenizer, "one")
    async with serving(engine, tokenizer) as s:
        status, answer = await generate(s, PROMPT, logprobs=1, skip_special_tokens=False, stop_token_ids=[7])
    (choice,) = answer["choices"]
    sampled = engine.answered[0]
    assert status == 200
    assert engine.asked[0][0] == PROMPT
    assert {7, engine.end} <= set(engine.asked[0][1].stop_token_ids)
    assert choice["token_ids"] == sampled.token_ids.tolist()
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in sampled.token_ids]
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == sampled.logprobs.tolist()
    assert choice["versions"] == sampled.versions.tolist()
    assert (choice["finish_reason"], answer["usage"]["prompt_tokens"]) == ("stop", 3)


async def test_prompts_extend_branch_and_retry(tokenizer: FileTokenizer, tmp_path: Path):
    engine = Engine(tokenizer, "one", "two", "three", "four")
    async with serving(engine, tokenizer) as s:
        first = (await generate(s, PROMPT))[1]["choices"][0]["token_ids"]
        await generate(s, [*PROMPT, *first, 68])
        await generate(s, [*PROMPT, *first, 69])  # a branch
        await generate(s, [*PROMPT, *first[:-1], 70])  # not what was sampled: a history of its own
        found = export(s.session.tree, NAMES, picker=all_leaves)
    wire = WireRecord(tmp_path / "wire.sqlite")
    for (ids, _), answered in zip(engine.asked, engine.answered, strict=True):
        wire.add(ids, answered)
    wire.flush()
    assert [len(t.turns) for t in found] == [2, 2, 1]
    assert [p for t in found for p in audit_trajectory(t, wire, policy_version=9)] == []
    assert sum(t.trainable_tokens for t in found) == sum(len(g.token_ids) for g in engine.answered)
    assert [t.conversation for t in found] == [None, None, None]
    wire.close()


async def test_the_same_prompt_again_is_a_retry(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "one", "two")
    async with serving(engine, tokenizer) as s:
        await generate(s, PROMPT)
        await generate(s, PROMPT)
        assert len(export(s.session.tree, NAMES, picker=all_leaves)) == 2
        (kept,) = export(s.session.tree, NAMES)
    assert kept.token_ids.tolist() == [*PROMPT, *engine.answered[1].token_ids.tolist()]


async def test_a_linear_session_takes_the_next_prompt_alone(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "one", "two", "three"), tokenizer, mode="linear") as s:
        first = (await generate(s, PROMPT))[1]["choices"][0]["token_ids"]
        assert (await generate(s, [*PROMPT, 99]))[0] == 409
        assert (await s.chat([user("x")]))[0] == 409
        assert (await generate(s, [*PROMPT, *first, 68]))[0] == 200


async def test_a_failed_prompt_leaves_no_trace_and_a_cut_one_is_not_extended(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, EngineError("broken"), "a long answer"), tokenizer) as s:
        assert (await generate(s, PROMPT))[0] == 502
        assert (s.session.tree.nodes, s.session.tree.busy) == (0, False)
        answer = (await generate(s, PROMPT, max_tokens=2))[1]["choices"][0]
        assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 2)
        assert (await generate(s, [*PROMPT, *answer["token_ids"], 68]))[0] == 409


async def test_turns_of_messages_and_of_tokens_never_meet(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "one", "two")
    async with serving(engine, tokenizer) as s:
        await s.chat([user("x")])
        ids = [int(i) for i in (*engine.asked[0][0], *engine.answered[0].token_ids)]
        answer = (await generate(s, [*ids, 68]))[1]
        assert [leaf.turns for leaf in s.session.tree.leaves()] == [1, 1]
        body = {"model": "m", "input": "more", "previous_response_id": f"resp_{answer['request_id']}"}
        assert (await s.post("v1/responses", body))[0] == 400


REFUSED = [
    {},
    {"token_ids": []},
    {"token_ids": "abc"},
    {"token_ids": [1, -1]},
    {"token_ids": [1, 1.0]},
    {"token_ids": [True]},
    {"token_ids": [2**31]},
    {"token_ids": PROMPT, "stream": True},
    {"token_ids": PROMPT, "features": {"x": 1}},
    {"token_ids": PROMPT, "sampling_params": {"n": 2}},
    {"token_ids": PROMPT, "sampling_params": {"logit_bias": {"5": 1}}},
    {"token_ids": PROMPT, "sampling_params": {"repetition_penalty": 1.1}},
    {"token_ids": PROMPT, "sampling_params": {"max_tokens": 0}},
    {"token_ids": PROMPT, "sampling_params": {"stop_token_ids": ["x"]}},
]


async def test_what_cannot_be_sampled_is_a_400_that_says_why(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "x")
    async with serving(engine, tokenizer) as s:
        for body in REFUSED:
            status, answer = await s.post("inference/v1/generate", body)
            assert (status, engine.asked) == (400, []), body
            assert len(answer["error"]["message"]) > 10
