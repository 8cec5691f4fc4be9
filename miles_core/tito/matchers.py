"""When a message that a client replays is the one that was stored: three canonical digests, strictest first.

Null, "" and [] are one thing to every matcher, a list of text blocks is its concatenation, and what no renderer reads
(ids of tool calls, names, cache hints) is not looked at.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import orjson
import xxhash

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.matchers import MessageMatcher

__all__ = ["RoleContentMatcher", "StrictMatcher", "ToolArgumentsMatcher"]


class StrictMatcher(MessageMatcher[ComponentConfig]):
    """Role, content, reasoning, and tool calls (name and argument text), byte for byte."""

    def digest(self, message: Mapping[str, Any]) -> bytes:
        """xxh3-128 of what a renderer reads."""
        content = message.get("content")
        if type(content) is str and len(message) == 2 and message.get("role") in _SHORT:
            return _plain(message["role"], content)  # nearly every message of a long history
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
        made = [(name, self._arguments(arguments)) for name, arguments in map(_function, calls or ())]
        if not reasoning and not made:
            return _plain(message.get("role"), _text(content))
        return xxhash.xxh3_128_digest(_bytes([message.get("role"), _text(content), reasoning or "", made]))

    def _arguments(self, arguments: Any) -> Any:
        return arguments


class ToolArgumentsMatcher(StrictMatcher):
    """As `strict`, but JSON objects as arguments are equal however they are spelled.

    Order of keys, white space and escapes do not matter, numbers are compared as decimals. Clients that parse the
    arguments and write them again (every Anthropic client does) need it. Arguments with a repeated key or NaN, and
    those that are not JSON, equal their own text alone.
    """

    def _arguments(self, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        try:
            return _canonical(_DECODER.decode(arguments))
        except (ValueError, RecursionError, decimal.InvalidOperation):
            return arguments


class RoleContentMatcher(MessageMatcher[ComponentConfig]):
    """Role and content alone: for clients that lose reasoning or rewrite tool calls. Histories that differ only there
    merge."""

    merges_histories = True

    def digest(self, message: Mapping[str, Any]) -> bytes:
        """xxh3-128 of role and content."""
        return _plain(message.get("role"), _text(message.get("content")))


_SHORT = {"user": "u", "assistant": "a", "tool": "t", "system": "s", "developer": "d"}


def _plain(role: Any, content: Any) -> bytes:
    """Digest of a message that only says something. What is hashed otherwise is a JSON list, so a letter in front of
    the text is told from it."""
    if isinstance(content, str) and isinstance(role, str) and role in _SHORT:
        return xxhash.xxh3_128_digest((_SHORT[role] + content).encode("utf-8", "surrogatepass"))
    return xxhash.xxh3_128_digest(_bytes([role, content]))


def _text(content: Any) -> Any:
    """Content as text where it is text; anything else stays what it is."""
    if not content:
        return ""
    if isinstance(content, Sequence) and all(isinstance(b, Mapping) and b.get("type") == "text" for b in content):
        return "".join(str(block.get("text") or "") for block in content)
    return content


def _function(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", call)
    return function.get("name"), function.get("arguments") or "{}"


def _bytes(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # lone surrogates, numbers beyond 64 bits
        return json.dumps(value, default=str).encode()


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a repeated key")
    return members


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=decimal.Decimal, parse_int=decimal.Decimal, parse_constant=_refuse
)


def _canonical(value: Any) -> Any:
    """A JSON value that is equal for equal values: keys sorted, numbers as sign, digits and exponent."""
    if isinstance(value, dict):
        return {"object": [[key, _canonical(value[key])] for key in sorted(value)]}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, decimal.Decimal):
        sign, digits, exponent = value.as_tuple()
        assert isinstance(exponent, int)  # NaN and infinity do not parse
        text = "".join(map(str, digits))
        short = text.rstrip("0")
        return {"number": ["", "0", 0] if not short else ["-" * sign, short, exponent + len(text) - len(short)]}
    return value
