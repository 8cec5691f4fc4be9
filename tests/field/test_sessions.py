"""Kinds of faults in conversations that users of comparable systems met: the right behaviour, seen from a client."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from miles_core.contracts.engines import Generation
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.engines.pool import EnginePool
from miles_core.errors import EngineUnavailable
from miles_core.testing.stub_engine import StubEngine, stub_engine
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.export import Identity, all_leaves, export
from miles_core.tito.families.qwen3 import Qwen3Config, Qwen3Family
from tests.tito.serving import Engine, Serving, serving, user

NAMES = Identity(prompt_id="p", group_id="g", episode_id="e")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), added=TAGS))


def thinking() -> Qwen3Family:
    return Qwen3Family(Qwen3Config(thinking="free"))


def sampled(engine: Engine) -> list[int]:
    return [int(i) for g in engine.answered for i in g.token_ids]


def trained(s: Serving) -> list[int]:
    return [int(i) for t in export(s.session.tree, NAMES, picker=all_leaves) for i in t.token_ids[t.loss_mask]]


def reply_of(answer: Any) -> dict[str, Any]:
    return answer["choices"][0]["message"]


def thought(tokenizer: FileTokenizer, reasoning: str, content: str) -> list[int]:
    """A reply of a model that thinks, tags as tokens."""
    tags = [tokenizer.special(tag) for tag in ("<think>", "</think>", "<|im_end|>")]
    return [
        tags[0], *tokenizer.encode(f"\n{reasoning}\n"), tags[1], *tokenizer.encode(f"\n\n{content}"), tags[2]
    ]  # fmt: skip


@pytest.mark.parametrize("strips", [False, True], ids=["the client keeps reasoning", "the client strips it"])
async def test_an_answer_behind_reasoning_is_in_the_history_once(tokenizer: FileTokenizer, strips: bool) -> None:
    engine = Engine(tokenizer, thought(tokenizer, "because", "ANSWER1"), thought(tokenizer, "R2", "A2"))
    async with serving(engine, tokenizer, family=thinking()) as s:
        reply = reply_of((await s.chat([user("U1")]))[1])
        assert (reply["reasoning_content"], reply["content"]) == ("because", "ANSWER1")
        kept = {k: v for k, v in reply.items() if not strips or k != "reasoning_content"}
        assert (await s.chat([user("U1"), kept, user("U2")]))[0] == 200
        prompt = tokenizer.decode(engine.asked[1][0])
        assert (prompt.count("ANSWER1"), prompt.count("because")) == (1, 0 if strips else 1)
        assert sorted(trained(s)) == sorted(sampled(engine)), "every sampled token trains once, whatever was stripped"


async def test_a_plan_in_the_middle_is_in_every_later_prompt_as_it_was_sampled(tokenizer: FileTokenizer) -> None:
    plan = thought(tokenizer, "plan A", "doing step one")
    engine = Engine(tokenizer, plan, thought(tokenizer, "plan B", "doing it"), "done")
    async with serving(engine, tokenizer, family=thinking()) as s:
        messages = [user("Run the task.")]
        for more in ("Format error: retry.", "go on"):
            messages += [reply_of((await s.chat(messages))[1]), user(more)]
        await s.chat(messages)
    for ids, _ in engine.asked[1:]:
        assert ids[len(engine.asked[0][0]) :][: len(plan)] == plan
    assert engine.asked[2][0][: len(engine.asked[1][0])] == engine.asked[1][0]


CALLS = "\n".join(
    f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    for arguments in ('{"path": "a.py", "n": 1.0, "s": "\\u00e9"}', "{}")
)


def calling(tokenizer: FileTokenizer) -> list[int]:
    ids: list[int] = []
    for line in CALLS.split("\n"):
        added = tokenizer.added(line)
        ids += [*tokenizer.encode("\n" if ids else ""), *([added] if added is not None else tokenizer.encode(line))]
    return [*ids, tokenizer.special("<|im_end|>")]


async def test_results_in_a_row_are_one_users_block(tokenizer: FileTokenizer) -> None:
    engine = Engine(tokenizer, calling(tokenizer), "fine")
    async with serving(engine, tokenizer) as s:
        reply = reply_of((await s.chat([user("do")]))[1])
        assert len(reply["tool_calls"]) == 2
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "r"} for c in reply["tool_calls"]]
        assert (await s.chat([user("do"), reply, *results]))[0] == 200
    new = tokenizer.decode(engine.asked[1][0][len(engine.asked[0][0]) + len(engine.answered[0].token_ids) :])
    assert (new.count("<|im_start|>user"), new.count("<tool_response>")) == (1, 2)


async def test_ids_that_encode_to_others_stay_as_they_were_sampled(tokenizer: FileTokenizer) -> None:
    split = [i for letter in "hello" for i in tokenizer.encode(letter)]
    engine = Engine(tokenizer, [*split, tokenizer.special("<|im_end|>")], "more")
    async with serving(engine, tokenizer) as s:
        reply = reply_of((await s.chat([user("x")]))[1])
        await s.chat([user("x"), reply, user("y")])
        assert reply["content"] == "hello"
        assert engine.asked[1][0][len(engine.asked[0][0]) :][: len(split)] == split
        assert sorted(trained(s)) == sorted(sampled(engine))


async def test_arguments_that_the_client_spells_anew_are_the_same_turn(tokenizer: FileTokenizer) -> None:
    """Compact, keys sorted, no escapes; the number stays the decimal that it is."""
    engine = Engine(tokenizer, calling(tokenizer), "fine", "other")
    async with serving(engine, tokenizer) as s:
        reply = reply_of((await s.chat([user("do")]))[1])
        again = json.loads(json.dumps(reply))
        read = json.loads(again["tool_calls"][0]["function"]["arguments"])
        spelled = json.dumps(read, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert spelled == '{"n":1.0,"path":"a.py","s":"é"}'
        again["tool_calls"][0]["function"]["arguments"] = spelled
        await s.chat([user("do"), again, {"role": "tool", "content": "r"}])
        assert [leaf.turns for leaf in s.session.tree.leaves()] == [2], "the turn was extended as it was sampled"
        again["tool_calls"][0]["function"]["arguments"] = spelled.replace("1.0", "1.5")
        await s.chat([user("do"), again, {"role": "tool", "content": "r"}])
        assert [leaf.turns for leaf in s.session.tree.leaves()] == [2, 1], "other arguments are another history"


async def test_a_lone_end_and_an_abort_before_the_first_token_are_turns(tokenizer: FileTokenizer) -> None:
    end = tokenizer.special("<|im_end|>")
    engine = Engine(tokenizer, [end], ([], "abort"), [*tokenizer.encode("ok"), end])
    async with serving(engine, tokenizer) as s:
        first = reply_of((await s.chat([user("a")]))[1])
        assert first["content"] == ""
        status, answer = await s.chat([user("a"), first, user("b")])
        assert (status, reply_of(answer)["content"]) == (200, "ok")
        (trajectory,) = export(s.session.tree, NAMES)
    assert [t.stop - t.start for t in trajectory.turns] == [1, 0, 3]
    assert sorted(trained(s)) == sorted(sampled(engine))


async def test_a_turn_over_an_update_keeps_the_version_of_each_token(tokenizer: FileTokenizer) -> None:
    end = tokenizer.special("<|im_end|>")
    engine = Engine(tokenizer, (tokenizer.encode("ab"), "abort"), [*tokenizer.encode("cd"), end])
    async with serving(engine, tokenizer) as s:
        await s.chat([user("x")])
        (trajectory,) = export(s.session.tree, NAMES)
    assert trajectory.versions[trajectory.loss_mask].tolist() == [1, 1, 2, 2, 2]
    assert trajectory.oldest_version == 1


async def test_a_client_cannot_sample_at_another_temperature_than_what_trains(tokenizer: FileTokenizer) -> None:
    engine = Engine(tokenizer, "x")
    async with serving(engine, tokenizer, locked=True) as s:
        await s.chat([user("x")], temperature=0.6, top_p=0.5)
        params = {"temperature": 0.6, "top_k": 3}
        await s.post("inference/v1/generate", {"token_ids": [65], "sampling_params": params})
    assert {(asked.temperature, asked.top_p, asked.top_k) for _, asked in engine.asked} == {(1.0, 1.0, -1)}


async def test_a_turn_behind_an_update_asks_for_no_prefix_of_the_old_weights(tokenizer: FileTokenizer) -> None:
    engine = StubEngine(lambda ids, params: [65, 66])
    async with stub_engine(engine) as url:
        pool = EnginePool([url], wait_for_weights=True)
        async with serving(pool, tokenizer) as s:
            messages = [user("x")]
            for version in (1, 2):
                pool.admit(url, version)
                engine.version = version
                messages += [reply_of((await s.chat(messages))[1]), user("more")]
        await pool.close()
    first, second = engine.requests
    assert second["input_ids"][: len(first["input_ids"])] == first["input_ids"]
    assert first["extra_key"] != second["extra_key"]


class Routed(Engine):
    """Gives routed experts; `short` rows are missing at the end of what was asked before."""

    short = 0

    async def generate(self, input_ids: Any, sampling: Any, **options: Any) -> Generation:
        generation = await super().generate(input_ids, sampling, **options)
        length, start = len(input_ids) + len(generation.token_ids), max(len(input_ids) - 1 + self.short, 0)
        start = start if len(self.asked) > 1 else 0
        rows = np.ones((length - 1 - start, 1, 1), np.int32)
        return dataclasses.replace(generation, routed_experts=rows, routed_start=start)


@pytest.mark.parametrize("short", [-60, 1], ids=["rows overlap", "a row is missing"])
async def test_a_row_short_at_a_turns_boundary_is_an_error_and_no_expert_zero(
    tokenizer: FileTokenizer, short: int
) -> None:
    engine = Routed(tokenizer, "one", "two")
    engine.short = short
    async with serving(engine, tokenizer) as s:
        first = reply_of((await s.chat([user("x")]))[1])
        status, _ = await s.chat([user("x"), first, user("y")])
        (trajectory,) = export(s.session.tree, NAMES)
    assert (status, len(trajectory.turns)) == ((502, 1) if short > 0 else (200, 2))
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.shape == (len(trajectory) - 1, 1, 1)
    assert (trajectory.routed_experts == 1).all()


async def test_a_retry_whose_engine_fails_for_good_has_rolled_nothing_back(tokenizer: FileTokenizer) -> None:
    engine = Engine(tokenizer, "one", EngineUnavailable("gone"), "two")
    async with serving(engine, tokenizer, mode="linear") as s:
        first = reply_of((await s.chat([user("x")]))[1])
        assert (await s.chat([user("x")]))[0] == 503
        assert (await s.chat([user("x"), first, user("y")]))[0] == 200
        (trajectory,) = export(s.session.tree, NAMES)
    assert len(trajectory.turns) == 2
    assert sorted(trained(s)) == sorted(sampled(engine))


async def test_a_turn_cut_by_length_is_not_extended_and_later_turns_are_not_lost(tokenizer: FileTokenizer) -> None:
    engine = Engine(tokenizer, "a long answer", "a long answer", "fine")
    async with serving(engine, tokenizer) as s:
        cut = reply_of((await s.chat([user("x")], max_tokens=3))[1])
        assert (await s.chat([user("x"), cut, user("y")]))[0] == 409
        whole = reply_of((await s.chat([user("x")]))[1])
        assert (await s.chat([user("x"), whole, user("y")]))[0] == 200
        (kept,) = export(s.session.tree, NAMES)
    assert [t.finish_reason for t in kept.turns] == ["stop", "stop"]
    assert kept.trainable_tokens == sum(len(g.token_ids) for g in engine.answered[1:])


@pytest.mark.parametrize("versions", [[57, 1], [1, 57]])
async def test_versions_are_carried_as_the_engine_counts_them(tokenizer: FileTokenizer, versions: list[int]) -> None:
    """A counter that went back is the scheduler's to refuse; a session neither mends nor hides it."""

    class Counting(Engine):
        async def generate(self, *args: Any, **options: Any) -> Generation:
            generation = await super().generate(*args, **options)
            version = versions[len(self.asked) - 1]
            return dataclasses.replace(generation, versions=np.full(len(generation.token_ids), version, np.int32))

    async with serving(Counting(tokenizer, "one", "two"), tokenizer) as s:
        first = reply_of((await s.chat([user("x")]))[1])
        await s.chat([user("x"), first, user("y")])
        (trajectory,) = export(s.session.tree, NAMES)
    assert list(dict.fromkeys(trajectory.versions[trajectory.loss_mask].tolist())) == versions
    assert trajectory.oldest_version == 1
