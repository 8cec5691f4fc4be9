"""Episodes from a scripted engine: exactly its tokens, its reasons for stopping, and turns joined in tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import Endpoint, EpisodeTask, Outcome
from miles_core.data.tokenizer import FileTokenizer
from miles_core.data.trajectory import Status
from miles_core.errors import ConfigError, EnvironmentFailure
from miles_core.rollout.environments.callable import CallableAgent, CallableAgentConfig
from miles_core.rollout.environments.single_turn import SingleTurn, SingleTurnConfig
from miles_core.rollout.environments.tools import ToolLoop, ToolLoopConfig, describe
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily

FAMILY = ChatMLFamily(ChatMLConfig())
Make = Callable[..., EpisodeTask]
TOOLS = '''
import asyncio, time
from miles_core.errors import EnvironmentFailure

def add(a: int, b: int = 1) -> int:
    """Add two integers."""
    return a + b

async def shout(text: str) -> str:
    return text.upper()

def broken():
    raise KeyError("gone")

async def slow():
    await asyncio.sleep(60)

def down():
    raise EnvironmentFailure("the service is down")

def long() -> str:
    return "x" * 100
'''


def bound(environment: Any, tokenizer: FileTokenizer) -> Any:
    environment.bind(FAMILY, tokenizer)
    return environment


def single(tokenizer: FileTokenizer) -> SingleTurn:
    return bound(SingleTurn(SingleTurnConfig()), tokenizer)


# single_turn


async def test_trajectory_is_what_the_engine_sampled(tokenizer: FileTokenizer, make_task: Make, scripted: Any):
    """Sampled ["he", "llo"], which decodes and encodes again to ["hello"]: the sampled ids stay."""
    he, llo = tokenizer.encode("he")[0], tokenizer.encode("llo")[0]
    assert len(tokenizer.encode("hello")) == 1
    engine = scripted(([he, llo, tokenizer.eos_id], "stop"))
    task = make_task()
    episode = await single(tokenizer).generate(task, engine)
    (trajectory,) = episode.trajectories
    (asked, sampling, key), *_ = engine.requests
    prompt = FAMILY.render(task.prompt.messages, tokenizer, add_generation_prompt=True)
    assert asked == prompt
    assert trajectory.token_ids.tolist() == [*prompt, he, llo, tokenizer.eos_id]
    assert trajectory.versions[len(prompt) :].tolist() == [1, 1, 1]
    np.testing.assert_allclose(trajectory.logprobs[len(prompt) :], [-0.5, -0.51, -0.52])
    assert episode.status is Status.COMPLETED
    assert episode.messages[-1] == {"role": "assistant", "content": "hello"}
    assert (sampling.seed, sampling.stop_token_ids, key) == (task.turn_seed(0), (tokenizer.eos_id,), "g.0")


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)]
)
@pytest.mark.parametrize("said", [[], [65, 66]])
async def test_status_follows_the_finish_reason(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, said: list[int], reason: str, status: Status
):
    episode = await single(tokenizer).generate(make_task(), scripted((said, reason)))
    assert episode.status is status
    assert episode.trajectories[0].status is status
    assert episode.trajectories[0].trainable_tokens == len(said)


async def test_lone_stop_token_is_one_trained_token_and_an_empty_answer(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any
):
    episode = await single(tokenizer).generate(make_task(), scripted(([tokenizer.eos_id], "stop")))
    assert episode.status is Status.COMPLETED
    assert episode.trajectories[0].trainable_tokens == 1
    assert episode.messages[-1]["content"] == ""


async def test_max_tokens_bounds_the_request(tokenizer: FileTokenizer, make_task: Make, scripted: Any):
    length = len(FAMILY.render(make_task().prompt.messages, tokenizer, add_generation_prompt=True))
    engine = scripted(([65], "length"))
    await single(tokenizer).generate(make_task(max_tokens=length + 3), engine)
    assert engine.requests[0][1].max_new_tokens == 3
    with pytest.raises(EnvironmentFailure, match=f"has {length} tokens, which leaves none of max_tokens {length}"):
        await single(tokenizer).generate(make_task(max_tokens=length), scripted())


# tools


@pytest.fixture(scope="module")
def tool_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture
def loop(tokenizer: FileTokenizer, tool_file: Path) -> Callable[..., ToolLoop]:
    def make(*names: str, **options: Any) -> ToolLoop:
        tools = tuple(f"{tool_file}:{name}" for name in names)
        return bound(ToolLoop(ToolLoopConfig(tools=tools, **options)), tokenizer)

    return make


def say(tokenizer: FileTokenizer, text: str) -> tuple[list[int], str]:
    """Sampled byte by byte, as no encoder would."""
    return [*(i for character in text for i in tokenizer.encode(character)), tokenizer.special("<|im_end|>")], "stop"


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_turns_are_joined_in_tokens(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, loop: Callable[..., ToolLoop]
):
    calls = [call("add", '{"a": 2}'), call("shout", '{"text": "hi"}')]
    first = say(tokenizer, "\n".join(["hello", *calls]))
    last = say(tokenizer, "3 and HI")
    engine = scripted(first, last, routes=(2, 2))
    task = make_task()
    episode = await loop("add", "shout").generate(task, engine)
    (trajectory,) = episode.trajectories

    (before, _, _), (after, sampling, _) = engine.requests
    injected = after[len(before) + len(first[0]) :]
    assert after[: len(before) + len(first[0])] == [*before, *first[0]]
    assert tokenizer.decode(injected) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nHI\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert trajectory.token_ids.tolist() == [*after, *last[0]]
    expected = [False] * len(before) + [True] * len(first[0]) + [False] * len(injected) + [True] * len(last[0])
    assert trajectory.loss_mask.tolist() == expected
    assert sampling.seed == task.turn_seed(1) != task.turn_seed(0)
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert episode.messages[2]["tool_call_id"] == episode.messages[1]["tool_calls"][0]["id"]
    assert episode.status is Status.COMPLETED
    assert trajectory.routed_experts is not None


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (call("nothing"), "Error: there is no tool nothing; there are add"),
        (call("add", '{"a": "x"}'), "Error: 1 validation error for add"),
        (call("add", '{"a": 1, "c": 2}'), "Extra inputs are not permitted"),
        (call("broken"), "Error: KeyError: 'gone'"),
        (call("slow"), "Error: slow did not finish within 0.05 s"),
        (call("long"), "xxxxxxxxxx\n[90 more characters were cut]"),
    ],
)
async def test_what_goes_wrong_with_a_tool_is_told_to_the_model(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, loop: Callable[..., ToolLoop], said: str, result: str
):
    engine = scripted(say(tokenizer, said), say(tokenizer, "done"))
    names = ["add", "broken", "slow"] + (["long"] if "long" in said else [])
    environment = loop(*names, tool_timeout=0.05, max_result_chars=10 if "long" in said else 1000)
    episode = await environment.generate(make_task(), engine)
    assert result in episode.messages[2]["content"]
    assert episode.status is Status.COMPLETED


async def test_infrastructure_of_a_tool_fails_the_episode(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, loop: Callable[..., ToolLoop]
):
    with pytest.raises(EnvironmentFailure, match="the service is down"):
        await loop("down").generate(make_task(), scripted(say(tokenizer, call("down"))))


async def test_a_turn_that_ended_by_length_or_abort_is_never_extended(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, loop: Callable[..., ToolLoop]
):
    """Also when what it said up to there spells a call."""
    ids, _ = say(tokenizer, call("add", '{"a": 1}'))
    for reason, status in (("length", Status.TRUNCATED), ("abort", Status.ABORTED)):
        engine = scripted((ids, reason))
        episode = await loop("add").generate(make_task(), engine)
        assert len(engine.requests) == 1
        assert episode.status is status
        assert episode.trajectories[0].trainable_tokens == len(ids)


async def test_max_turns_and_max_tokens_truncate(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, loop: Callable[..., ToolLoop]
):
    said = say(tokenizer, call("add", '{"a": 1}'))
    engine = scripted(said, said)
    episode = await loop("add", max_turns=2).generate(make_task(), engine)
    assert episode.status is Status.TRUNCATED
    assert len(engine.requests) == 2
    assert bool(episode.trajectories[0].loss_mask[-1])

    room = len(engine.requests[0][0]) + len(said[0])
    episode = await loop("add").generate(make_task(max_tokens=room + 5), scripted(said))
    assert episode.status is Status.TRUNCATED
    assert len(episode.trajectories[0]) == room


async def test_rows_restrict_what_is_offered(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, loop: Callable[..., ToolLoop]
):
    engine = scripted(say(tokenizer, call("add", '{"a": 1}')), say(tokenizer, "done"))
    shout = ({"type": "function", "function": {"name": "shout"}},)
    episode = await loop("add", "shout").generate(make_task(tools=shout), engine)
    assert '"name": "add"' not in tokenizer.decode(engine.requests[0][0])
    assert episode.messages[2]["content"] == "Error: there is no tool add; there are shout"
    with pytest.raises(EnvironmentFailure, match="offers the tools shout, which"):
        await loop("add").generate(make_task(tools=shout), scripted())


async def test_cancelling_an_episode_cancels_its_tools(
    tokenizer: FileTokenizer, make_task: Make, scripted: Any, loop: Callable[..., ToolLoop]
):
    episode = asyncio.ensure_future(loop("slow").generate(make_task(), scripted(say(tokenizer, call("slow")))))
    await asyncio.sleep(0.05)
    begin, others = time.perf_counter(), len(asyncio.all_tasks())
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert time.perf_counter() - begin < 5
    assert len(asyncio.all_tasks()) < others


def test_schema_comes_from_the_signature():
    def find(query: str, limit: int = 3) -> list[str]:
        """Find documents.

        By words.
        """
        return [query] * limit

    function = describe(find).schema["function"]
    assert function["name"] == "find"
    assert function["description"] == "Find documents.\n\nBy words."
    assert function["parameters"]["required"] == ["query"]
    assert function["parameters"]["properties"]["limit"]["default"] == 3


def test_star_parameters_cannot_be_described():
    def variable(*parts: str) -> None: ...

    with pytest.raises(TypeError, match="cannot be filled by name"):
        describe(variable)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nowhere.at_all:f", "there is no module nowhere"),
        ("nowhere.py:f", "there is no file"),
        ("json:dumpz", "json has no function dumpz.*did you mean 'dump'"),
        ("json", "is no function reference"),
    ],
)
def test_functions_that_are_not_there(reference: str, reason: str):
    with pytest.raises(ConfigError, match=f"(?s){reason}"):
        ToolLoop(ToolLoopConfig(tools=(reference,)))


def test_two_tools_of_one_name(tool_file: Path):
    with pytest.raises(ConfigError, match="two tools are named add"):
        ToolLoop(ToolLoopConfig(tools=(f"{tool_file}:add", f"{tool_file}:add")))


# callable


AGENT = """
from miles_core.contracts.environments import Outcome

async def run(endpoint, prompt, sampling, metadata, extra=0):
    return Outcome(reward=1.0, metrics={"seen": len(prompt.messages) + extra})

async def wrong(endpoint, prompt, sampling, metadata):
    return 1.0

def blocking(endpoint, prompt, sampling, metadata):
    return Outcome()
"""


async def test_callable_agent(tmp_path: Path, make_task: Make):
    path = tmp_path / "agent.py"
    path.write_text(AGENT)

    def run(name: str, **options: Any) -> Any:
        agent = CallableAgent(CallableAgentConfig(function=f"{path}:{name}", **options))
        endpoint = Endpoint(base_url="http://localhost/sessions/1", token="t", model="m")
        return agent.run(endpoint, make_task().prompt, Sampling(max_new_tokens=1), {})

    assert await run("run", arguments={"extra": 2}) == Outcome(reward=1.0, metrics={"seen": 3})
    with pytest.raises(EnvironmentFailure, match=r"returned 1.0, expected a miles_core Outcome"):
        await run("wrong")
    with pytest.raises(ConfigError, match="is not an async function"):
        run("blocking")
