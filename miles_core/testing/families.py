"""What the tests of model families share: a vocabulary with a family's tokens, its laws on many conversations, and
plain conversations to hold it to another implementation."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.contracts.families import ModelFamily
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.tokenizers import CHATML, write_tokenizer
from miles_core.tito.families.marked import Token
from miles_core.tito.verify import Verdict, verify

__all__ = ["PLAIN_TOOLS", "assert_equal", "assert_laws", "plain_conversations", "token_names", "vocabulary"]

Messages = list[dict[str, Any]]

_WORDS = ("hello", " world", "12", "a\nb", ".", "é", "x")
_VALUES: tuple[Any, ...] = (1, 2.5, True, None, [1, 2], {"x": "é"})
PLAIN_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds é <b>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "first\nline", "minimum": 1},
                    "s": {"type": "string", "enum": ["a", "b"]},
                    "l": {"type": "array", "items": {"type": "integer", "description": "d"}},
                    "o": {
                        "type": "object",
                        "properties": {"q": {"type": ["string", "null"]}},
                        "required": ["q"],
                        "additionalProperties": False,
                    },
                },
                "required": ["s"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "n", "description": "N", "parameters": {"type": "object", "properties": {}}},
    },
)


def token_names(family: ModelFamily[Any]) -> list[str]:
    """The tokens that the module of `family` defines."""
    module = sys.modules[type(family).__module__]
    found = [value for value in vars(module).values() if isinstance(value, Token)]
    return list(dict.fromkeys([token.name for token in found] + list(family.stop_tokens())))


def vocabulary(family: ModelFamily[Any], directory: Path, *, lacking: Sequence[str] = ()) -> FileTokenizer:
    """A small byte-level tokenizer that has the tokens of `family` but those that are `lacking`."""
    special = [name for name in (*CHATML, *token_names(family)) if name not in lacking]
    return load_tokenizer(write_tokenizer(directory, special=special))


def assert_laws(family: ModelFamily[Any], tokenizer: FileTokenizer, *, count: int, seed: int = 0) -> Verdict:
    """Fails where `family` breaks a law on `count` generated conversations, or refuses one."""
    verdict = verify(family, tokenizer, count=count, seed=seed, special=sorted(tokenizer.special_names))
    assert not verdict.broken, verdict.findings
    assert verdict.refused == 0, verdict.findings
    assert verdict.calls > 0, "no conversation had a tool call"
    return verdict


def plain_conversations(
    count: int, *, reasoning: bool, tools: bool = True, turns: int = 3, seed: int = 0
) -> Iterator[tuple[Messages, Sequence[Mapping[str, Any]]]]:
    """Conversations of plain words that end with a question or a result, and the tools that they offer. `reasoning`: on
    every reply, or on none. `turns`: the most questions. Calls have ids as Kimi counts them."""
    pick = random.Random(seed)

    def text() -> str:
        return "".join(pick.choice(_WORDS) for _ in range(pick.randrange(1, 4))).strip()

    for _ in range(count):
        messages: Messages = [{"role": "system", "content": text()}] if pick.random() < 0.5 else []
        offered = tools and pick.random() < 0.5
        made = 0
        for _turn in range(pick.randrange(1, turns + 1)):
            messages.append({"role": "user", "content": text()})
            for _step in range(3):
                reply: dict[str, Any] = {"role": "assistant", "content": text()}
                if reasoning:
                    reply["reasoning_content"] = text()
                calls = [_call(pick, made + n, text()) for n in range(pick.randrange(3) if offered and made < 8 else 0)]
                made += len(calls)
                messages.append({**reply, "tool_calls": calls} if calls else reply)
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": text()} for call in calls]
                if not calls:
                    break
        if messages[-1]["role"] == "assistant":
            if turns == 1:
                messages.pop()
            else:
                messages.append({"role": "user", "content": text()})
        yield messages, PLAIN_TOOLS if offered else ()


def assert_equal(
    family: ModelFamily[Any],
    theirs: Callable[[Messages, Sequence[Mapping[str, Any]]], str],
    conversations: Iterator[tuple[Messages, Sequence[Mapping[str, Any]]]],
) -> None:
    """Fails where the text of `family`, up to the next generation prompt, is not that of another implementation."""
    compared = 0
    for messages, tools in conversations:
        ours = "".join(s.text for s in family.segments(messages, tools=tools, add_generation_prompt=True))
        expected = theirs(messages, tools)
        at = next((i for i, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(ours), len(expected)) if at is None else at
        assert ours == expected, f"at {at}: {ours[at : at + 60]!r}, they say {expected[at : at + 60]!r}\n{messages}"
        compared += 1
    assert compared > 0


def _call(pick: random.Random, number: int, text: str) -> dict[str, Any]:
    arguments = json.dumps({"a": pick.choice(_VALUES), "s": text}, ensure_ascii=False)
    return {"id": f"functions.add:{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}
