"""An agent environment in a run: an episode is a session, and what trains is what the engine sampled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_core.config.load import load_config
from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import AgentEnvironment, Endpoint, EpisodeTask, Outcome
from miles_core.data.group import Prompt
from miles_core.data.parquet import read_rollouts, write_rollouts
from miles_core.data.tokenizer import FileTokenizer
from miles_core.data.trajectory import Status
from miles_core.errors import EnvironmentFailure
from miles_core.plugins import PluginManager
from miles_core.runs.audit import audit_run
from miles_core.runs.directory import RunDirectory
from miles_core.runs.loop import train
from miles_core.tito.agent_runner import AgentRunner
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.fidelity import HARD
from miles_core.tito.matchers import ToolArgumentsMatcher
from tests.tito.serving import Engine, user


class Agent(AgentEnvironment[ComponentConfig]):
    """Runs a function of the test."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(ComponentConfig())
        self.function = function

    async def run(self, endpoint: Endpoint, prompt: Prompt, sampling: Sampling, metadata: Mapping[str, Any]) -> Outcome:
        return await self.function(endpoint, prompt)


async def ask(endpoint: Endpoint, messages: list[Any], **fields: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        body = {"model": endpoint.model, "messages": messages, **fields}
        async with http.post(f"{endpoint.base_url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            return (await response.json())["choices"][0]["message"]


def task(**fields: Any) -> EpisodeTask:
    prompt = Prompt(prompt_id="p", messages=({"role": "user", "content": "hello"},))
    chosen = {"sampling": Sampling(max_new_tokens=50), "seed": 7, "priority": 3, **fields}
    return EpisodeTask(prompt=prompt, group_id="g", episode_id="g.0", **chosen)


async def episode(tokenizer: FileTokenizer, engine: Engine, function: Callable[..., Any], **fields: Any) -> Any:
    runner = AgentRunner(Agent(function), ToolArgumentsMatcher(ComponentConfig()))
    runner.bind(ChatMLFamily(ChatMLConfig()), tokenizer)
    await runner.setup()
    try:
        return await runner.generate(task(**fields), engine)
    finally:
        assert runner._server is not None
        assert len(runner._server.app.store) == 0
        await runner.close()
        await runner.close()


async def two_turns(endpoint: Endpoint, prompt: Prompt) -> Outcome:
    first = await ask(endpoint, list(prompt.messages), temperature=0.1)
    await ask(endpoint, [*prompt.messages, first, user("more")])
    return Outcome(reward=0.5, metrics={"own": 1.0})


async def test_an_episode_of_two_turns(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "one", "two")
    done = await episode(tokenizer, engine, two_turns)
    (trajectory,) = done.trajectories
    assert (done.status, done.reward, trajectory.reward) == (Status.COMPLETED, 0.5, 0.5)
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.prompt_id) == ("g.0.0", "g", "p")
    assert [m["content"] for m in done.messages] == ["hello", "one", "more", "two"]
    assert [sampling.seed for _, sampling in engine.asked] == [task().turn_seed(0), task().turn_seed(1)]
    assert {sampling.temperature for _, sampling in engine.asked} == {1.0}
    assert done.metrics["turns"] == 2
    assert done.metrics["own"] == 1
    assert trajectory.trainable_tokens == done.metrics["response_tokens"]


async def test_forks_are_several_trajectories_of_one_episode(tokenizer: FileTokenizer):
    async def forks(endpoint: Endpoint, prompt: Prompt) -> Outcome:
        first = await ask(endpoint, list(prompt.messages))
        await asyncio.gather(*(ask(endpoint, [*prompt.messages, first, user(text)]) for text in "ab"))
        return Outcome()

    done = await episode(tokenizer, Engine(tokenizer, "one", "two"), forks)
    assert [t.trajectory_id for t in done.trajectories] == ["g.0.0", "g.0.1"]
    shared, branch = done.trajectories
    assert len(shared.turns) == len(branch.turns) == 2
    assert shared.trainable_tokens > branch.trainable_tokens > 0


async def test_a_limit_truncates(tokenizer: FileTokenizer):
    async def until_refused(endpoint: Endpoint, prompt: Prompt) -> Outcome:
        messages = list(prompt.messages)
        for _ in range(5):
            try:
                messages += [await ask(endpoint, messages), user("more")]
            except AssertionError:
                break
        return Outcome()

    done = await episode(tokenizer, Engine(tokenizer, "0123456789"), until_refused, max_tokens=120)
    assert done.status is Status.TRUNCATED
    assert 0 < len(done.trajectories[0]) <= 120


async def test_an_agent_that_asks_nothing_failed(tokenizer: FileTokenizer):
    async def silent(endpoint: Endpoint, prompt: Prompt) -> Outcome:
        return Outcome(reward=1.0)

    with pytest.raises(EnvironmentFailure, match="without one answered request"):
        await episode(tokenizer, Engine(tokenizer, "x"), silent)


async def test_a_cancelled_episode_leaves_nothing(tokenizer: FileTokenizer):
    engine = Engine(tokenizer, "x")
    engine.gate = asyncio.Event()
    running = asyncio.create_task(episode(tokenizer, engine, two_turns))
    while not engine.waiting:
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.waiting == 0


AGENT = """
import aiohttp
from miles_core.contracts.environments import Outcome

STOP = list("abcdefghijklmnopqrstuvwxyz0123456789")  # a random model hardly ever ends a turn by itself


async def run(endpoint, prompt, sampling, metadata):
    messages, headers = list(prompt.messages), {"Authorization": f"Bearer {endpoint.token}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for turn in range(3):
            body = {"model": "policy", "messages": messages, "stop": STOP}
            async with http.post(f"{endpoint.base_url}/v1/chat/completions", json=body) as response:
                choice = (await response.json())["choices"][0]
            messages += [choice["message"], {"role": "user", "content": "go on"}]
            if choice["finish_reason"] == "length":
                break
    return Outcome()
"""

CONFIG = """
[run]
name = "agent"
steps = 2
export = false

[model]
path = "tiny:0"

[data]
use = "jsonl"
path = "prompts.jsonl"

[environment]
use = "callable"
function = "agent.py:run"

[reward]
use = "callable"
function = "agent.py:score"

[sampling]
max_new_tokens = 24

[schedule]
batch_groups = 2
group_size = 4
"""


@pytest.mark.slow
def test_a_run_with_an_agent_passes_its_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    score = "\n\ndef score(sample):\n    return float(len(sample.response) % 5)\n"
    Path("agent.py").write_text(AGENT + score)
    Path("prompts.jsonl").write_text('{"prompt": "one", "label": ""}\n{"prompt": "two", "label": ""}\n')
    Path("run.toml").write_text(CONFIG)
    loaded, plugins = load_config(Path("run.toml"), ()), PluginManager.discover()
    directory = RunDirectory.create(tmp_path / "runs", loaded, plugins)
    assert train(loaded, plugins, directory).steps == 2
    result = audit_run(directory)
    directory.unlock()
    assert result.hard_mismatches == 0, result.text
    assert result.trajectories == 16
    assert result.turns > 24
    assert result.conversations == 16
    assert sum(result.by_class[kind] for kind in HARD) == 0
    assert "special-token count 0, special-token type 0, non-assistant text 0, assistant text" in result.text
    reworded(directory)
    spoiled = audit_run(directory)
    assert spoiled.by_class["non-assistant text"] == spoiled.hard_mismatches == 1
    assert "non-assistant text: behind special token" in spoiled.text


def reworded(directory: RunDirectory) -> None:
    """One conversation on disk says something else than its tokens."""
    path = directory.rollout_file(1)
    first, *others = read_rollouts(path)
    assert first.conversation is not None
    changed = dataclasses.replace(first, conversation=first.conversation.replace('"content":"', '"content":"no ', 1))
    write_rollouts(path, [changed, *others], step=1, policy_version=0)
