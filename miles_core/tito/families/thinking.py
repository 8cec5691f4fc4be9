"""ChatML with `<think>` blocks, for families whose models reason before they answer.

The official templates drop the thinking of earlier turns from history; these families keep it, so that history is
append-only. They equal the templates wherever those are append-only themselves.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from miles_core.contracts.families import ParsedReply, Segment
from miles_core.tito.families.calls import OPEN as CALL
from miles_core.tito.families.calls import Piece, as_segments, certain_content
from miles_core.tito.families.chatml import END, ChatMLConfigT, ChatMLFamily, content_text

__all__ = ["ThinkBlock", "Thinking", "ThinkingFamily"]

OPEN, CLOSE = "<think>", "</think>"

Thinking = Literal["free", "off", "forced", "none"]
"""`free`: the model opens the block itself. `off`: the prompt brings an empty one. `forced`: the prompt opens it.
`none`: there is no block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThinkBlock:
    """How thinking is written: `inside` stands between it and `</think>`, `behind` between that and the content
    (`behind_alone`: also when nothing follows). The block that a prompt without thinking brings holds `empty`, and
    `empty_behind` follows it."""

    thinking: Thinking
    inside: str = "\n"
    behind: str = "\n\n"
    behind_alone: bool = True
    empty: str = "\n\n"
    empty_behind: str = "\n\n"

    def brought(self) -> list[Piece]:
        """The part of the block that the prompt brings."""
        if self.thinking == "off":
            return [(OPEN, True), (self.empty, False), (CLOSE, True), (self.empty_behind, False)]
        return [(OPEN, True), ("\n", False)] if self.thinking == "forced" else []

    def pieces(self, reasoning: str | None, *, alone: bool) -> list[Piece]:
        """The part that the model writes; `alone`: nothing follows it."""
        opened: list[Piece] = [(OPEN, True), ("\n", False)] if self.thinking == "free" and reasoning is not None else []
        if not opened and self.thinking != "forced":
            return []
        behind = self.behind if self.behind_alone or not alone else ""
        return [*opened, (f"{reasoning or ''}{self.inside}", False), (CLOSE, True), (behind, False)]

    def split(self, text: str) -> tuple[str | None, str, bool]:
        """(reasoning, what follows it, whether it is closed) of a reply: the newlines of the format are nobody's."""
        if self.thinking in ("off", "none"):
            return None, text, True
        if self.thinking == "free":
            if not text.startswith(OPEN):
                return None, text, True
            text = text[len(OPEN) :].removeprefix("\n")
        reasoning, close, rest = text.partition(CLOSE)
        if not close:
            return reasoning, "", False
        for newline in self.behind:
            rest = rest.removeprefix(newline)
        return reasoning.removesuffix(self.inside), rest, True


class ThinkingFamily(ChatMLFamily[ChatMLConfigT], abc.ABC):
    """One class for the ways to think. A reply that ends inside its thinking is all reasoning."""

    @property
    @abc.abstractmethod
    def block(self) -> ThinkBlock:
        """How this family's models think."""

    def opening(self, index: int) -> list[Segment]:
        """See `ChatMLFamily.opening`. The part of a thinking block that the prompt brings was not sampled."""
        return [*super().opening(index), *as_segments(self.block.brought(), role="assistant", message=index)]

    def assistant_segments(self, message: Mapping[str, Any], index: int) -> list[Segment]:
        """See `ChatMLFamily.assistant_segments`. Raises `ValueError` for thinking where a reply has none."""
        reasoning, block = message.get("reasoning_content"), self.block
        if reasoning and block.thinking in ("off", "none"):
            raise ValueError(
                f"message {index}: reasoning_content, but with thinking = {block.thinking!r} no reply has any; "
                "leave it out, or choose thinking = 'free' or 'forced'"
            )
        content, calls = content_text(message, index), message.get("tool_calls") or ()
        pieces = [
            *block.pieces(reasoning, alone=not content and not calls),
            *self.calls.pieces(content, calls),
        ]
        return [
            *self.opening(index),
            *as_segments(pieces, role="assistant", message=index, sampled=True),
            Segment(END, special=True, role="assistant", message=index, sampled=True),
            Segment("\n", role="assistant", message=index),
        ]

    def parse_text(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
        """See `ChatMLFamily.parse_text`."""
        reasoning, rest, _ = self.block.split(text)
        content, calls, malformed = self.calls.extract(rest, tools)
        if calls and self.block.thinking == "free" and reasoning is None and content.startswith(OPEN):
            # It stood behind a call; rendered in front of it, it would be thinking. No call counts, as in `extract`.
            return ParsedReply(content=rest, malformed=malformed)
        return ParsedReply(content=content, reasoning=reasoning, tool_calls=calls, malformed=malformed)

    def parse_partial(self, text: str) -> ParsedReply:
        """See `ChatMLFamily.parse_partial`."""
        block = self.block
        if block.thinking == "free" and OPEN.startswith(text[: len(OPEN)]) and len(text) <= len(OPEN):
            return ParsedReply(content="")  # it may open a block, or go on with a newline that belongs to it
        reasoning, rest, closed = block.split(text)
        if reasoning is not None and not closed:
            return ParsedReply(
                content="", reasoning=certain_content(reasoning, (CLOSE, END), newlines=len(block.inside))
            )
        return ParsedReply(content=self.calls.certain(rest, (CALL, END)), reasoning=reasoning)
