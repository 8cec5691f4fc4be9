"""Qwen3: ChatML with `<think>` blocks and Hermes tool calls.

The official templates drop the thinking of earlier turns from history; this family keeps it, so that history is
append-only. It equals them wherever they are append-only themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from miles_core.contracts.component import Example, Workbench
from miles_core.contracts.families import Evidence, ParsedReply, Segment
from miles_core.tito.families.chatml import END, ChatMLConfig, ChatMLFamily, content_text
from miles_core.tito.families.hermes import OPEN as CALL
from miles_core.tito.families.hermes import as_segments, call_pieces, certain_content, extract_calls

__all__ = ["Qwen3Config", "Qwen3Family"]

OPEN, CLOSE = "<think>", "</think>"


class Qwen3Config(ChatMLConfig):
    """Section `[model.family]` of `qwen3`."""

    thinking: Literal["free", "off", "forced", "none"] = "free"
    """How the model thinks: `free`, where it opens the block itself (Qwen3); `off`, where the prompt brings an empty
    one (Qwen3 with `enable_thinking = false`); `forced`, where the prompt opens it (Thinking 2507, Next Thinking);
    `none`, where there is no block (Instruct 2507, Next Instruct)."""


class Qwen3Family(ChatMLFamily[Qwen3Config]):
    """One class for the four ways to think. A reply that ends inside its thinking is all reasoning."""

    Config = Qwen3Config
    evidence: Evidence = "template-equal"

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Thinking as Qwen3 does by default."""
        return Example()

    def opening(self, index: int) -> list[Segment]:
        """See `ChatMLFamily.opening`. The part of a thinking block that the prompt brings was not sampled."""
        brought = {
            "off": [(OPEN, True), ("\n\n", False), (CLOSE, True), ("\n\n", False)],
            "forced": [(OPEN, True), ("\n", False)],
        }
        pieces = brought.get(self.config.thinking, [])
        return [*super().opening(index), *as_segments(pieces, role="assistant", message=index)]

    def assistant_segments(self, message: Mapping[str, Any], index: int) -> list[Segment]:
        """See `ChatMLFamily.assistant_segments`. Raises `ValueError` for thinking where a reply has none."""
        reasoning = message.get("reasoning_content")
        thinking = self.config.thinking
        if reasoning and thinking in ("off", "none"):
            raise ValueError(
                f"message {index}: reasoning_content, but with thinking = {thinking!r} no reply has any; "
                "leave it out, or choose thinking = 'free' or 'forced'"
            )
        pieces = [(OPEN, True), ("\n", False)] if thinking == "free" and reasoning is not None else []
        if pieces or thinking == "forced":
            pieces += [(f"{reasoning or ''}\n", False), (CLOSE, True), ("\n\n", False)]
        content = content_text(message, index)
        pieces.append((content, False))
        for number, call in enumerate(message.get("tool_calls") or ()):
            pieces += [("\n", False)] if number or content else []
            pieces += call_pieces(call)
        return [
            *self.opening(index),
            *as_segments(pieces, role="assistant", message=index, sampled=True),
            Segment(END, special=True, role="assistant", message=index, sampled=True),
            Segment("\n", role="assistant", message=index),
        ]

    def parse_text(self, text: str) -> ParsedReply:
        """See `ChatMLFamily.parse_text`."""
        reasoning, rest, _ = self._split(text)
        content, calls, malformed = extract_calls(rest)
        return ParsedReply(content=content, reasoning=reasoning, tool_calls=calls, malformed=malformed)

    def parse_partial(self, text: str) -> ParsedReply:
        """See `ChatMLFamily.parse_partial`."""
        if self.config.thinking == "free" and OPEN.startswith(text[: len(OPEN)]) and len(text) <= len(OPEN):
            return ParsedReply(content="")  # it may open a block, or go on with a newline that belongs to it
        reasoning, rest, closed = self._split(text)
        if reasoning is not None and not closed:
            return ParsedReply(content="", reasoning=certain_content(reasoning, (CLOSE, END)))
        return ParsedReply(content=certain_content(rest, (CALL, END)), reasoning=reasoning)

    def _split(self, text: str) -> tuple[str | None, str, bool]:
        """(reasoning, what follows it, whether it is closed): one newline inside each tag and two behind the block are
        the block's own."""
        if self.config.thinking in ("off", "none"):
            return None, text, True
        if self.config.thinking == "free":
            if not text.startswith(OPEN):
                return None, text, True
            text = text[len(OPEN) :].removeprefix("\n")
        reasoning, close, rest = text.partition(CLOSE)
        if not close:
            return reasoning, "", False
        return reasoning.removesuffix("\n"), rest.removeprefix("\n").removeprefix("\n"), True
