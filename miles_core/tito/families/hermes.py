"""Hermes tool calls: JSON objects between `<tool_call>` and `</tool_call>`, shared by the ChatML families.

Format: the chat template of NousResearch/Hermes-2-Pro, as Qwen2.5 and Qwen3 publish it. The tags are added tokens in
Qwen vocabularies and plain text in others, so they are rendered as optional special segments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from miles_core.contracts.families import Segment

__all__ = ["call_pieces", "certain_content", "extract_calls", "tool_prompt_pieces"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# An opening tag up to its closing tag, the next opening tag or the end.
_LEFT_OVER = re.compile(rf"{OPEN}(?:(?!{OPEN}).)*?(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")  # JSON white space, RFC 8259

Piece = tuple[str, bool]
"""A text and whether it is an (optional) special token."""


def tool_prompt_pieces(tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """The paragraph of the system prompt that offers `tools` (Chat Completions tool objects)."""
    listing = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    return [
        (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>{listing}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within ",
            False,
        ),
        (OPEN, True),
        (CLOSE, True),
        (" XML tags:\n", False),
        (OPEN, True),
        ('\n{"name": <function-name>, "arguments": <args-json-object>}\n', False),
        (CLOSE, True),
    ]


def call_pieces(call: Mapping[str, Any]) -> list[Piece]:
    """One tool call as the model writes it. Argument text goes in as it stands; a mapping is written as JSON.

    Raises `ValueError` for a call without a function name.
    """
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool call {call!r} has no function name; expected {{'function': {{'name': …}}}}")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    body = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n'
    return [(OPEN, True), (body, False), (CLOSE, True)]


def as_segments(pieces: Sequence[Piece], *, role: str, message: int, sampled: bool = False) -> list[Segment]:
    """Pieces with their provenance."""
    return [
        Segment(text, special=token, optional=token, role=role, message=message, sampled=sampled)
        for text, token in pieces
    ]


def extract_calls(text: str) -> tuple[str, tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Split an assistant's text into (content, tool calls, malformed calls).

    Argument text is kept as the model wrote it. One newline in front of a call belongs to the call. A block that is
    not a JSON object with a string `name` and an object `arguments` is malformed: it stays in the content, where
    scanning goes on right behind its opening tag, so that one broken call does not hide the next.
    """
    pieces: list[str] = []
    calls: list[dict[str, Any]] = []
    kept = position = 0
    while (start := text.find(OPEN, position)) >= 0:
        position = start + len(OPEN)
        read = _read_call(text, position)
        if read is not None:
            call, position = read
            calls.append(call)
            pieces.append(text[kept:start].removesuffix("\n"))
            kept = position
    content = "".join([*pieces, text[kept:]])
    return content, tuple(calls), tuple(match[0] for match in _LEFT_OVER.finditer(content))


def certain_content(text: str, marks: Sequence[str]) -> str:
    """The start of an unfinished text that stays content: up to the first of `marks`, or to what may become one, and
    without the newline in front of it, which belongs to a call."""
    cut = min((at for mark in marks if (at := text.find(mark)) >= 0), default=len(text))
    if cut == len(text):
        lengths = [n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])]
        cut -= max(lengths, default=0)
    return text[:cut].removesuffix("\n")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_call(text: str, position: int) -> tuple[dict[str, Any], int] | None:
    """The call whose block starts at `position`, and the position behind its closing tag; None when malformed."""
    try:
        members, position = _read_object(text, _skip(text, position))
    except ValueError:
        return None
    position = _skip(text, position)
    if not text.startswith(CLOSE, position) or members.keys() != {"name", "arguments"}:
        return None
    (name, _), (arguments, written) = members["name"], members["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or _has_surrogate(name):
        return None
    return {"type": "function", "function": {"name": name, "arguments": written}}, position + len(CLOSE)


def _read_object(text: str, position: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object at `position`, each as (value, text as written). A repeated key is malformed."""
    members: dict[str, tuple[Any, str]] = {}
    separator = "{"
    while True:
        if not text.startswith(separator, position):
            raise ValueError(f"expected {separator!r} at {position}")
        start = _skip(text, position + 1)
        if text.startswith("}", start) and not members:
            return members, start + 1
        key, position = _decode(text, start)
        position = _skip(text, position)
        if not isinstance(key, str) or key in members or not text.startswith(":", position):
            raise ValueError(f"expected a new key and a colon at {start}")
        start = _skip(text, position + 1)
        value, position = _decode(text, start)
        members[key] = (value, text[start:position])
        position = _skip(text, position)
        if text.startswith("}", position):
            return members, position + 1
        separator = ","


def _decode(text: str, position: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except RecursionError as error:  # a policy can write ten thousand brackets
        raise ValueError(f"JSON nested too deeply at {position}") from error


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
