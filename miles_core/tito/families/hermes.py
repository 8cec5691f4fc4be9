"""Hermes tool calls: JSON objects between `<tool_call>` and `</tool_call>`, shared by the ChatML families.

Format: the chat template of NousResearch/Hermes-2-Pro, as Qwen2.5 and Qwen3 publish it. The tags are added tokens in
Qwen vocabularies and plain text in others, so they are rendered as optional special segments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from miles_core.tito.families.calls import CLOSE, OPEN, CallFormat, Piece, Reader, Tools, name_of

__all__ = ["HermesCalls", "read_json", "read_object", "tool_prompt_pieces"]

_SPACE = re.compile(r"[ \t\r\n]*")  # JSON white space, RFC 8259


def tool_prompt_pieces(tools: Tools) -> list[Piece]:
    """The paragraph of the system prompt that offers `tools`."""
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


class HermesCalls(CallFormat):
    """A block that is not a JSON object with a string `name` and an object `arguments` is malformed. Argument text
    goes in and comes out as it stands; a mapping is written as JSON."""

    def call_pieces(self, call: Mapping[str, Any]) -> list[Piece]:
        """See `CallFormat.call_pieces`."""
        name, arguments = name_of(call)
        arguments = arguments or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        body = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n'
        return [(OPEN, True), (body, False), (CLOSE, True)]

    def reader(self, text: str, tools: Tools) -> Reader:
        """See `CallFormat.reader`."""
        return lambda position: _read_call(text, position)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key is repeated")
    return members


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _read_call(text: str, position: int) -> tuple[dict[str, Any], int] | None:
    try:
        members, position = read_object(text, position)
    except ValueError:
        return None
    position = _skip(text, position)
    if not text.startswith(CLOSE, position) or members.keys() != {"name", "arguments"}:
        return None
    (name, _), (arguments, written) = members["name"], members["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or _has_surrogate(name):
        return None
    return {"type": "function", "function": {"name": name, "arguments": written}}, position + len(CLOSE)


def read_object(text: str, position: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object at `position`, each as (value, text as written), and the position behind it.

    Raises `ValueError` for anything else, NaN, infinities and a repeated key included.
    """
    members: dict[str, tuple[Any, str]] = {}
    separator, position = "{", _skip(text, position)
    while True:
        if not text.startswith(separator, position):
            raise ValueError(f"expected {separator!r} at {position}")
        start = _skip(text, position + 1)
        if text.startswith("}", start) and not members:
            return members, start + 1
        key, position = read_json(text, start)
        position = _skip(text, position)
        if not isinstance(key, str) or key in members or not text.startswith(":", position):
            raise ValueError(f"expected a new key and a colon at {start}")
        start = _skip(text, position + 1)
        value, position = read_json(text, start)
        members[key] = (value, text[start:position])
        position = _skip(text, position)
        if text.startswith("}", position):
            return members, position + 1
        separator = ","


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """The JSON value at `position`, and the position behind it. Raises `ValueError` for anything else."""
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
