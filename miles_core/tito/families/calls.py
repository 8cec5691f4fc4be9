"""What every tool-call format of the ChatML families shares: calls stand behind the content, each between tags."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.contracts.families import Segment

__all__ = ["CLOSE", "OPEN", "CallFormat", "Piece", "Reader", "Tools", "as_segments", "certain_content", "name_of"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# An opening tag up to its closing tag, the next opening tag or the end.
_LEFT_OVER = re.compile(rf"{OPEN}(?:(?!{OPEN}).)*?(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)

Piece = tuple[str, bool]
"""A text and whether it is an (optional) special token."""

Tools = Sequence[Mapping[str, Any]]
"""Chat Completions tool objects."""

Reader = Callable[[int], tuple[dict[str, Any], int] | None]
"""From the position behind an opening tag to the call and the position behind its closing tag; None when malformed."""


class CallFormat(abc.ABC):
    """How calls are written and read. `before` stands between content and the first call, `between` between calls,
    `behind` at the end; `before` is written behind an empty content too where `always_before` is set."""

    before = "\n"
    between = "\n"
    behind = ""
    always_before = False

    @abc.abstractmethod
    def call_pieces(self, call: Mapping[str, Any]) -> list[Piece]:
        """One tool call as the model writes it. Raises `ValueError` for one that the format cannot write."""

    @abc.abstractmethod
    def reader(self, text: str, tools: Tools) -> Reader:
        """Reads the calls of `text`."""

    def pieces(self, content: str, calls: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """Content and calls as the model writes them."""
        out: list[Piece] = [(content, False)]
        for number, call in enumerate(calls):
            lead = self.between if number else self.before if content or self.always_before else ""
            out += [(lead, False), *self.call_pieces(call)]
        return [*out, (self.behind, False)] if calls else out

    def extract(self, text: str, tools: Tools = ()) -> tuple[str, tuple[dict[str, Any], ...], tuple[str, ...]]:
        """Split an assistant's text into (content, tool calls, malformed calls).

        A malformed block stays in the content, where scanning goes on right behind its opening tag, so that one broken
        call does not hide the next. White space around calls belongs to them. What a model says between or behind its
        calls is content too; where a broken block would then be read together with its new neighbours, none of the
        calls counts, and all of the text is content: a message that is rendered again must not say something else.
        """
        content, calls = self._scan(text, tools)
        if calls and OPEN in content:
            again = "".join(piece for piece, _ in self.pieces(content, calls))
            if self._scan(again, tools) != (content, calls):
                content, calls = text, []
        return content, tuple(calls), tuple(match[0] for match in _LEFT_OVER.finditer(content))

    def certain(self, text: str, marks: Sequence[str]) -> str:
        """The start of an unfinished text that stays content, whatever follows. See `certain_content`."""
        return certain_content(text, marks, newlines=len(self.before))

    def _scan(self, text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        read = self.reader(text, tools)
        calls: list[dict[str, Any]] = []
        pieces: list[str] = []
        kept = position = 0
        while (start := text.find(OPEN, position)) >= 0:
            position = start + len(OPEN)
            found = read(position)
            if found is not None:
                gap = text[kept:start]
                pieces.append(_without_newlines(gap, len(self.before)) if not calls else gap if gap.strip() else "")
                calls.append(found[0])
                kept = position = found[1]
        rest = text[kept:]
        return "".join([*pieces, rest if not calls or rest.strip() else ""]), calls


def as_segments(pieces: Sequence[Piece], *, role: str, message: int, sampled: bool = False) -> list[Segment]:
    """Pieces with their provenance."""
    return [
        Segment(text, special=token, optional=token, role=role, message=message, sampled=sampled)
        for text, token in pieces
        if text
    ]


def certain_content(text: str, marks: Sequence[str], *, newlines: int = 1) -> str:
    """The start of an unfinished text that stays content: up to the first of `marks`, or to what may become one, and
    without the `newlines` in front of it, which belong to a call."""
    cut = min((at for mark in marks if (at := text.find(mark)) >= 0), default=len(text))
    if cut == len(text):
        lengths = [n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])]
        cut -= max(lengths, default=0)
    return _without_newlines(text[:cut], newlines)


def name_of(call: Mapping[str, Any]) -> tuple[str, Any]:
    """(function name, arguments) of a tool call. Raises `ValueError` for a call without a function name."""
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool call {call!r} has no function name; expected {{'function': {{'name': …}}}}")
    return name, function.get("arguments")


def _without_newlines(text: str, count: int) -> str:
    for _ in range(count):
        text = text.removesuffix("\n")
    return text
