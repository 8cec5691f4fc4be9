"""Real agents, unmodified, through tasks of several turns: what they did is on disk, what was sampled is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_core.data.tokenizer import FileTokenizer
from miles_core.testing.scripted_policy import ReadPrompt
from miles_core.tito.families.qwen3 import Qwen3Config, Qwen3Family
from tests.agents.clients import ALL, Client
from tests.agents.harness import desk, run

THOUGHT = "<think>\nLet me see.\n</think>\n\n"
TASK = "Add the numbers in first.txt and second.txt, and write the sum to sum.txt."


def adding(client: Client, work: Path) -> Callable[[ReadPrompt], str]:
    """Thinks, reads both files in one turn, writes their sum, says that it is done. A request without tools is for a
    title."""

    def reply(prompt: ReadPrompt) -> str:
        found = re.findall(r"value (\d+)", "\n".join(prompt.results))
        if not prompt.tools:
            return f"{THOUGHT}Adding numbers"
        if not prompt.results:
            return f"{THOUGHT}I read both.\n{client.read(work / 'first.txt')}\n{client.read(work / 'second.txt')}"
        if len(prompt.results) == 2:
            return f"{THOUGHT}{client.write(work / 'sum.txt', str(sum(map(int, found))))}"
        return f"{THOUGHT}{client.finish}"

    return reply


def numbers(directory: Path) -> Path:
    work = directory / "work"
    work.mkdir()
    (work / "first.txt").write_text("value 4711\n")
    (work / "second.txt").write_text("value 1000\n")
    return work


@pytest.mark.parametrize("client", ALL, ids=repr)
async def test_a_task_with_thinking_and_parallel_calls(client: Client, tokenizer: FileTokenizer, tmp_path: Path):
    work = numbers(tmp_path)
    async with desk(tmp_path, tokenizer, adding(client, work), Qwen3Family(Qwen3Config())) as d:
        ended = await run(client.command(TASK), d, tmp_path, client.environment)
        assert ended.code == 0, ended
        assert (work / "sum.txt").read_text().strip() == "5711"
        branches = d.audited()
    assert {e.path for e in d.turns} == {client.path}
    assert sorted(len(b.turns) for b in branches)[-1] == 3  # one branch holds the whole task
    assert sum(len(b.turns) for b in branches) == len(d.turns)  # and the others are requests of their own
    print(f"\n{client.name}: {len(d.turns)} turns, {len(d.app.exchanges)} requests, {ended.seconds:.1f} s")


DELEGATED = "Let an agent read first.txt, and write the value that it finds to value.txt."
SUBTASK = "Read first.txt and report its value."


def delegating(client: Client, work: Path) -> Callable[[ReadPrompt], str]:
    """Has a sub-agent read the file, waits for what it says, writes that. The sub-agent reads and says."""

    def reply(prompt: ReadPrompt) -> str:
        said = "\n".join(text for role, text in prompt.messages if role == "user")
        value = re.search(r"value (\d+)", said)
        if not prompt.tools:
            return "Reading a file"
        if DELEGATED not in said:
            return f"It has value {value[1]}." if value else client.read(work / "first.txt")
        if not prompt.results:
            assert client.delegate is not None
            return client.delegate(SUBTASK)
        if value is None:
            return client.wait(prompt)
        written = any("value.txt" in text for role, text in prompt.messages if role == "assistant")
        return client.finish if written else client.write(work / "value.txt", value[1])

    return reply


@pytest.mark.parametrize("client", [client for client in ALL if client.delegate], ids=repr)
async def test_a_sub_agent_is_a_branch_from_the_root(client: Client, tokenizer: FileTokenizer, tmp_path: Path):
    work = numbers(tmp_path)
    async with desk(tmp_path, tokenizer, delegating(client, work)) as d:
        ended = await run(client.command(DELEGATED), d, tmp_path, client.environment)
        assert ended.code == 0, ended
        assert (work / "value.txt").read_text().strip() == "4711"
        branches = d.audited()
        roots = {leaf.path()[0].order for leaf in d.session.tree.leaves()}
    assert {e.path for e in d.turns} == {client.path}
    assert len(roots) == len(branches) >= 2  # neither continues the other
    assert sum(len(b.turns) for b in branches) == len(d.turns)
