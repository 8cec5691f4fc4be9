"""Proving what a family renders, on generated conversations: the laws of `ModelFamily`, one conversation at a time."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_core.contracts.families import ModelFamily, Tokenizer
from miles_core.data.segments import encode_segments

__all__ = ["Finding", "Verdict", "conversations", "verify"]

Messages = list[dict[str, Any]]

_WORDS = ("hello", " world", "12", "\n", "\n\n", "  x", ".", "é", "中文", "{", "")
_TAGS = ("<tool_call>", "</tool_call>", "<think>")
_ARGUMENTS = ("{}", '{"a": 1.0}', '{"path":"a.py","s":"\\u00e9"}', '{"s": "é\\n<|im_end|>", "deep": {"x": [1, null]}}')
TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds é <b>.", "parameters": {"type": "object", "properties": {}}},
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One law that one conversation breaks."""

    law: str
    detail: str
    messages: Messages


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was tried: how many conversations, how many the family refused, how often each law was broken, and the first
    finding of each."""

    conversations: int
    refused: int
    broken: Mapping[str, int]
    findings: tuple[Finding, ...]


def conversations(count: int, *, seed: int, special: Sequence[str], reasoning: bool) -> Iterator[tuple[Messages, bool]]:
    """Pairs of a conversation and whether it offers tools: system prompts, runs of tool results, hostile arguments,
    empty strings, and text that spells the `special` tokens. A pure function of `seed`."""
    pick = random.Random(seed)
    words = (*_WORDS, *_TAGS, *special)

    def text() -> str:
        return "".join(pick.choice(words) for _ in range(pick.randrange(4)))

    for _ in range(count):
        messages: Messages = [{"role": "system", "content": text()}] if pick.random() < 0.5 else []
        tools = pick.random() < 0.4
        for _turn in range(pick.randrange(1, 4)):
            messages.append({"role": "user", "content": text()})
            while True:
                reply: dict[str, Any] = {"role": "assistant", "content": text()}
                if reasoning and pick.random() < 0.5:
                    reply["reasoning_content"] = text()
                made = pick.randrange(3) if tools else 0
                if made:
                    calls = [{"name": "add", "arguments": pick.choice(_ARGUMENTS)} for _ in range(made)]
                    reply["tool_calls"] = [{"type": "function", "function": call} for call in calls]
                messages.append(reply)
                if not made or pick.random() < 0.3:
                    break
                messages += [{"role": "tool", "content": text()} for _ in range(made)]
        if messages[-1]["role"] == "assistant" and pick.random() < 0.5:
            messages.append({"role": "user", "content": text()})
        yield messages, tools


def verify(
    family: ModelFamily[Any], tokenizer: Tokenizer, *, count: int, seed: int = 0, special: Sequence[str] = ()
) -> Verdict:
    """Try the laws on `count` generated conversations. Those that the family refuses are counted apart."""
    broken: Counter[str] = Counter()
    first: dict[str, Finding] = {}
    refused = 0
    reasoning = _takes_reasoning(family)
    for messages, offered in conversations(count, seed=seed, special=special, reasoning=reasoning):
        tools = TOOLS if offered else ()
        try:
            found = list(_check(family, tokenizer, messages, tools))
        except ValueError as error:
            refused += 1
            first.setdefault("refused", Finding(law="refused", detail=str(error), messages=messages))
            continue
        for law, detail in found:
            broken[law] += 1
            first.setdefault(law, Finding(law=law, detail=detail, messages=messages))
    return Verdict(conversations=count, refused=refused, broken=dict(broken), findings=tuple(first.values()))


def _takes_reasoning(family: ModelFamily[Any]) -> bool:
    reply = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    try:
        family.segments([{"role": "user", "content": "a"}, reply])
    except ValueError:
        return False
    return True


def _check(
    family: ModelFamily[Any], tokenizer: Tokenizer, messages: Messages, tools: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """(law, what breaks it) of one conversation."""
    whole = family.render(messages, tokenizer, tools=tools, add_generation_prompt=True)
    for cut in range(1, len(messages) + 1):
        if messages[cut - 1]["role"] == "assistant":
            yield from _check_reply(family, tokenizer, messages, cut - 1, tools, whole)
        elif cut < len(messages) and messages[cut]["role"] == "assistant":
            part = family.render(messages[:cut], tokenizer, tools=tools, add_generation_prompt=True)
            if whole[: len(part)] != part:
                yield "append-only", f"the prompt for message {cut} is no prefix of the whole conversation"


def _check_reply(
    family: ModelFamily[Any],
    tokenizer: Tokenizer,
    messages: Messages,
    at: int,
    tools: Sequence[Mapping[str, Any]],
    whole: Sequence[int],
) -> Iterator[tuple[str, str]]:
    """The laws of one assistant message: what it samples is what parses, and its junction joins it to what follows."""
    prompt = family.render(messages[:at], tokenizer, tools=tools, add_generation_prompt=True)
    own = [s for s in family.segments(messages[: at + 1], tools=tools) if s.message == at and s.sampled]
    sampled = encode_segments(own, tokenizer)[0]
    message = family.parse(sampled, tokenizer).as_message()
    again = [s for s in family.segments([*messages[:at], message], tools=tools) if s.message == at and s.sampled]
    parsed = family.parse(encode_segments(again, tokenizer)[0], tokenizer).as_message()
    if parsed != message:
        yield "parse inverts render", f"message {at} is rendered and parsed as {parsed}, it was {message}"
    for length in range(0, len(sampled), 3):
        partial = family.partial(sampled[:length], tokenizer)
        certain = (message["content"], message.get("reasoning_content") or "")
        if not (certain[0].startswith(partial.content) and certain[1].startswith(partial.reasoning or "")):
            yield "streaming", f"message {at}: {partial} was certain after {length} ids, the reply is {message}"
            break
    drop, add = family.junction(sampled, tokenizer)
    if at + 1 < len(messages):
        rest = encode_segments(family.suffix(messages, after=at, tools=tools), tokenizer)[0]
        joined = [*prompt, *sampled[: len(sampled) - drop], *add, *rest]
        if joined != whole:
            yield "junction", f"prompt, message {at}, junction and suffix do not make the whole conversation"
