"""The text side of the audit: sessions agree with their conversations, and each class of mismatch is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pytest

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Sampling
from miles_core.data.parquet import rollout_table, trajectories_of
from miles_core.data.tokenizer import FileTokenizer
from miles_core.data.trajectory import NOT_SAMPLED, Trajectory
from miles_core.tito.export import Identity, all_leaves, export
from miles_core.tito.fidelity import CLASSES, HARD, compare
from miles_core.tito.generated import TOOLS, conversations
from miles_core.tito.matchers import ToolArgumentsMatcher
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.turns import TurnRequest
from miles_core.tito.verify import takes
from tests.tito.family_cases import CASES, Case, tags_are_tokens
from tests.tito.serving import Engine, user

NAMES = Identity(prompt_id="p", group_id="g", episode_id="e")
MANY = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return tags_are_tokens(tmp_path_factory.mktemp("tokenizer"))


def session_of(case: Case, tokenizer: FileTokenizer, *script: Any) -> Session:
    codec = Codec(family=case.made, tokenizer=tokenizer, matcher=ToolArgumentsMatcher(ComponentConfig()))
    engine = Engine(tokenizer, *script)
    return Session(codec, SessionSettings(engine=engine, sampling=Sampling(max_new_tokens=4000)))


async def played(
    case: Case, tokenizer: FileTokenizer, said: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> tuple[Trajectory, ...]:
    """A session in which the policy says what the assistant says in `said`."""
    family = case.made
    session = session_of(case, tokenizer)
    engine: Any = session.settings.engine
    history: list[Mapping[str, Any]] = []
    for message in said:
        if message["role"] != "assistant" or not history or history[-1]["role"] == "assistant":
            history.append(message)
            continue
        prompt = family.render(history, tokenizer, tools=tools, add_generation_prompt=True)
        whole = family.render([*history, message], tokenizer, tools=tools)
        stops = [tokenizer.special(t) for t in family.stop_tokens()]
        new = whole[len(prompt) :]
        end = next((i for i in reversed(range(len(new))) if new[i] in stops), len(new))
        engine.script.append(new[: end + 1])
        reply = await session.turn(TurnRequest(messages=history, tools=tools))
        history.append(reply.message)
    return export(session.tree, NAMES, picker=all_leaves)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {case.way}".strip())
async def test_what_a_session_holds_is_what_was_said(case: Case, tokenizer: FileTokenizer):
    reasoning = takes(case.made, {"role": "assistant", "content": "b", "reasoning_content": "c"})
    special = sorted(tokenizer.special_names)
    compared = soft = 0
    for said, offered in conversations(MANY, seed=4, special=special, reasoning=reasoning, developer=False):
        for trajectory in await played(case, tokenizer, said, TOOLS if offered else ()):
            found = list(compare(trajectory, case.made, tokenizer))
            assert not [m for m in found if m.kind in HARD], (found, trajectory.conversation)
            compared, soft = compared + len(trajectory.turns), soft + len(found)
    assert compared > MANY / 2
    assert soft <= compared / 20


CHATML = CASES[0]


async def honest(tokenizer: FileTokenizer) -> Trajectory:
    """Two turns of a conversation with a tool."""
    call = 'ok\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    session = session_of(CHATML, tokenizer, call, "it is 3")
    first = await session.turn(TurnRequest(messages=[user("hello")], tools=TOOLS))
    history = [user("hello"), first.message, {"role": "tool", "content": "3"}]
    await session.turn(TurnRequest(messages=history, tools=TOOLS))
    (trajectory,) = export(session.tree, NAMES)
    assert list(compare(trajectory, CHATML.made, tokenizer)) == []
    return trajectory


def spliced(t: Trajectory, at: int, gone: int, new: list[int]) -> Trajectory:
    """`gone` ids from `at` on replaced by others that nobody sampled."""

    def put(column: np.ndarray, value: Any) -> np.ndarray:
        return np.concatenate([column[:at], np.full(len(new), value, column.dtype), column[at + gone :]])

    ids = np.concatenate([t.token_ids[:at], np.array(new, np.int32), t.token_ids[at + gone :]])
    columns = {"loss_mask": put(t.loss_mask, False), "logprobs": put(t.logprobs, 0), "versions": put(t.versions, -1)}
    return dataclasses.replace(t, token_ids=ids, turns=(), **columns)


def junction(t: Trajectory) -> int:
    """Where the first reply ends and nobody's tokens begin."""
    sampled = t.versions != NOT_SAMPLED
    return int(np.flatnonzero(sampled[:-1] & ~sampled[1:])[0]) + 1


def no_junction(t: Trajectory, tokenizer: FileTokenizer) -> Trajectory:
    """The newline behind the first reply is missing, as where the official rendering is not followed."""
    return spliced(t, junction(t), 1, [])


def end_twice(t: Trajectory, tokenizer: FileTokenizer) -> Trajectory:
    return spliced(t, junction(t), 0, [tokenizer.special("<|im_end|>")])


def other_token(t: Trajectory, tokenizer: FileTokenizer) -> Trajectory:
    """The first message begins with another special token."""
    return spliced(t, 0, 1, [tokenizer.special("<|im_end|>")])


def other_history(t: Trajectory, tokenizer: FileTokenizer) -> Trajectory:
    """The conversation has another tool result than the one whose tokens are there."""
    return dataclasses.replace(t, conversation=t.conversation.replace('"content":"3"', '"content":"4"'))


def other_reply(t: Trajectory, tokenizer: FileTokenizer) -> Trajectory:
    return dataclasses.replace(t, conversation=t.conversation.replace("it is 3", "it is four"))


def other_tools(t: Trajectory, tokenizer: FileTokenizer) -> Trajectory:
    said = orjson.loads(t.conversation)
    said["tools"][0]["function"]["description"] = "Subtracts."
    return dataclasses.replace(t, conversation=orjson.dumps(said).decode())


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (end_twice, "special-token count"),
        (other_token, "special-token type"),
        (no_junction, "non-assistant text"),
        (other_history, "non-assistant text"),
        (other_tools, "non-assistant text"),
        (other_reply, "assistant text"),
    ],
)
async def test_each_class_of_mismatch_is_found(
    tokenizer: FileTokenizer, plant: Callable[[Trajectory, FileTokenizer], Trajectory], kind: str
):
    found = list(compare(plant(await honest(tokenizer), tokenizer), CHATML.made, tokenizer))
    assert [m.kind for m in found] == [kind]
    assert kind in CLASSES


async def test_a_conversation_travels_with_its_trajectory(tokenizer: FileTokenizer):
    trajectory = await honest(tokenizer)
    table = rollout_table([trajectory], step=1, policy_version=0)
    (read,) = trajectories_of(table)
    assert read.conversation == trajectory.conversation
    said = orjson.loads(read.conversation)
    assert [m["role"] for m in said["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert (said["replies"], len(said["tools"])) == ([1, 3], 2)


@pytest.mark.parametrize("ending", ["length", "stop string", "no end"])
async def test_replies_that_do_not_end_by_themselves(tokenizer: FileTokenizer, ending: str):
    session = session_of(CHATML, tokenizer)
    engine: Any = session.settings.engine
    ids = tokenizer.encode("some words STOP")
    engine.script = [(ids, "stop"), "fine"]
    asked = TurnRequest(
        messages=[user("hello")],
        stop=("STOP",) if ending == "stop string" else (),
        max_tokens=5 if ending == "length" else None,
    )
    reply = await session.turn(asked)
    if ending != "length":
        await session.turn(TurnRequest(messages=[user("hello"), reply.message, user("more")]))
    (trajectory,) = export(session.tree, NAMES)
    kinds = {m.kind for m in compare(trajectory, CHATML.made, tokenizer)}
    assert kinds == ({"assistant text"} if ending == "stop string" else set())


async def test_a_trajectory_cut_in_the_middle_is_no_mismatch(tokenizer: FileTokenizer):
    session = session_of(CHATML, tokenizer, "one", "two and more")
    first = await session.turn(TurnRequest(messages=[user("hello")]))
    await session.turn(TurnRequest(messages=[user("hello"), first.message, user("more")]))
    whole = export(session.tree, NAMES)[0]
    for length in range(1, len(whole)):
        (cut,) = export(session.tree, NAMES, max_tokens=length)
        assert list(compare(cut, CHATML.made, tokenizer)) == [], length
