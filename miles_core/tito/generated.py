"""Conversations that try a family: hostile text, typed tool arguments, calls that were never finished."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["BROKEN", "TOOLS", "conversations"]

Messages = list[dict[str, Any]]

_WORDS = ("hello", " world", "12", "\n", "\n\n", "  x", ".", "é", "中文", "{", "")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "<tool_response>", "</parameter>", "<function=add>")

BROKEN = (
    "<tool_call>",
    "</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}',
    '<tool_call>\n{"name": "add", "arguments": ',
    "{}}\n</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "a": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    "<tool_call>\n<function=write>\n<parameter=path>\na.py\n",
    "</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=write>\n</tool_call>",
    "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=path>\nb\n</parameter>\n</function>\n"
    "</tool_call>",
    "<tool_call><function=write><parameter=path>a.py</parameter></function></tool_call>",
)
"""Pieces of calls that no model should write and every model does: never closed, no JSON, a key twice, no object."""

TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds é <b>.", "parameters": {"type": "object", "properties": {}}},
    },
    {
        "type": "function",
        "function": {
            "name": "write",
            "description": " Writes a file. ",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where to."},
                    "lines": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "force": {"type": "boolean", "default": False},
                    "mode": {"type": ["string", "null"], "enum": ["r", "w", None]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "meta": {"anyOf": [{"type": "object"}, {"type": "string"}]},
                },
                "required": ["path"],
            },
        },
    },
)

_JSON = ("{}", '{"a": 1.0}', '{"path":"a.py","s":"\\u00e9"}', '{"s": "é\\n<|im_end|>", "deep": {"x": [1, null]}}')
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "path": ("a.py", "", "1", "true", "null", '{"a": 1}', " padded ", "\n", "a\n</parameter>\nb", "<tool_call>", "é中"),
    "lines": (0, -3, 10**20),
    "ratio": (0.5, 1.0, 1e-7, 2),
    "force": (True, False),
    "mode": ("r", None),
    "tags": ([], ["a", "</parameter>"]),
    "meta": ({"k": [1, {"é": None}]}, "text", "[1]"),
}


def conversations(
    count: int,
    *,
    seed: int,
    special: Sequence[str],
    reasoning: bool,
    developer: bool = False,
    gentle: bool = False,
) -> Iterator[tuple[Messages, bool]]:
    """Pairs of a conversation and whether it offers `TOOLS`: system prompts (`developer`: some are of that role), runs
    of tool results, hostile arguments, broken calls, empty strings, and text that spells the `special` tokens.

    `gentle` ones are such as official templates leave as they are: no white space around a text, no `<think>` in it,
    arguments as `json.dumps` writes them, thinking in all replies of a conversation or in none; some end at a tool
    result or with the first question. A pure function of the arguments.
    """
    pick = random.Random(seed)
    words = (*_WORDS, *_TAGS, *special)

    def text() -> str:
        said = "".join(pick.choice(words) for _ in range(pick.randrange(4)))
        return said.replace("<think>", "").strip() if gentle else said

    for _ in range(count):
        first = "developer" if developer and pick.random() < 0.3 else "system"
        messages: Messages = [{"role": first, "content": text()}] if pick.random() < 0.5 else []
        tools, thinks = pick.random() < 0.4, pick.random() < 0.7
        for _turn in range(pick.randrange(1, 4)):
            messages.append({"role": "user", "content": text()})
            while True:
                reply: dict[str, Any] = {"role": "assistant", "content": text()}
                if not gentle and pick.random() < 0.1:
                    reply["content"] += pick.choice(BROKEN) + text()
                if reasoning and (thinks if gentle else pick.random() < 0.5):
                    reply["reasoning_content"] = text() or ("so" if gentle else "")
                made = pick.randrange(3) if tools else 0
                if made:
                    calls = [_call(pick, text, gentle=gentle) for _ in range(made)]
                    reply["tool_calls"] = [{"type": "function", "function": call} for call in calls]
                messages.append(reply)
                if not made or pick.random() < 0.3:
                    break
                messages += [{"role": "tool", "content": text()} for _ in range(made)]
        if gentle and pick.random() < 0.5:
            messages = _cut(messages, pick.choice(("tool", "user")))
        if messages[-1]["role"] == "assistant" and (gentle or pick.random() < 0.5):
            messages.append({"role": "user", "content": text()})
        yield messages, tools


def _cut(messages: Messages, role: str) -> Messages:
    """Up to the last tool result, or to the first of the user's messages."""
    places = [at for at, message in enumerate(messages) if message["role"] == role]
    return messages if not places else messages[: places[-1 if role == "tool" else 0] + 1]


def _call(pick: random.Random, text: Callable[[], str], *, gentle: bool) -> dict[str, str]:
    if pick.random() < 0.5 and not gentle:
        return {"name": "add", "arguments": pick.choice(_JSON)}
    keys = pick.sample(sorted(_VALUES), pick.randrange(len(_VALUES)))
    values = {key: pick.choice(_VALUES[key]) for key in keys}
    if pick.random() < 0.3:
        values["path"] = text()
    compact = not gentle and pick.random() < 0.2
    escaped = not gentle and pick.random() < 0.2
    written = json.dumps(values, ensure_ascii=escaped, separators=(",", ":") if compact else None)
    return {"name": "write", "arguments": written}
