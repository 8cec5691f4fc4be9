"""Kimi: `<|im_user|>name<|im_middle|>…<|im_end|>`, tool calls in a section, each called by its id.

Format: the chat templates of Kimi-K2-Instruct and of K2.5 (K2.6 ships the same one), as the packages `renderers` and
`tml-renderers` write them. A call is written by its id, `functions.NAME:NUMBER`, from which the name is read; the
number counts the calls of the conversation (Moonshot's guide to tool calls). K2.5's template drops earlier
reasoning; this family keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.families import Evidence, ParsedReply, Segment
from miles_core.tito.families.calls import Tools, name_of
from miles_core.tito.families.chatml import content_text
from miles_core.tito.families.hermes import read_object
from miles_core.tito.families.marked import (
    MarkedFamily,
    Marks,
    Piece,
    Token,
    as_segments,
    leading_system,
    section_of,
    take_calls,
    tool_call,
)
from miles_models_kimi.typescript import declarations

__all__ = ["KimiConfig", "KimiFamily"]

SYSTEM, USER, ASSISTANT = map(Token, ("<|im_system|>", "<|im_user|>", "<|im_assistant|>"))
MIDDLE, END = Token("<|im_middle|>"), Token("<|im_end|>")
SECTION, SECTION_END = Token("<|tool_calls_section_begin|>"), Token("<|tool_calls_section_end|>")
CALL, ARGUMENTS, CALL_END = map(Token, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"))
THINK, THOUGHT = Token("<think>", tag=True), Token("</think>", tag=True)

_DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
_ID = re.compile(r"functions\.(.+):\d+", re.DOTALL)


class KimiConfig(ComponentConfig):
    """Section `[model.family]` of `kimi`."""

    version: Literal["k2", "k2.5", "k2.6"]
    """Which Kimi. K2 (Instruct) has no thinking; K2.6 is written as K2.5."""
    thinking: bool = True
    """False: the prompt of K2.5 and K2.6 closes the thinking before it begins. K2 has none either way."""


class KimiFamily(MarkedFamily[KimiConfig]):
    """Kimi K2, K2.5 and K2.6. Calls keep the ids that the model gave them; those that have none get the next one."""

    Config = KimiConfig
    evidence: Evidence = "verified"
    marks = Marks(THINK, THOUGHT, SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
    stops = (END,)

    _block = section_of(marks, SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END)

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Kimi K2.5."""
        return Example(settings={"version": "k2.5"})

    @property
    def _thinks(self) -> bool:
        return self.config.version != "k2" and self.config.thinking

    def head(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> tuple[list[Segment], int]:
        """See `MarkedFamily.head`. K2 has a system prompt of its own where the conversation brings none."""
        pieces: list[Piece] = []
        if tools:
            pieces += [SYSTEM, "tool_declare", MIDDLE, self._offered(tools), END]
        if self.config.version == "k2" and leading_system(messages) is None:
            pieces += [SYSTEM, "system", MIDDLE, _DEFAULT_SYSTEM, END, "\n"]
        return as_segments(pieces, role="system", message=-1), 0

    def said(self, role: str, text: str, index: int) -> list[Piece]:
        """See `MarkedFamily.said`."""
        return [SYSTEM if role == "system" else USER, role, MIDDLE, text, END]

    def run(self, messages: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[list[Piece]]:
        """See `MarkedFamily.run`."""
        results: list[list[Piece]] = []
        for index in indices:
            message = messages[index]
            header = f"## Return of {message.get('tool_call_id') or ''}\n"
            text = header + content_text(message, index)
            results.append([SYSTEM, message.get("name") or "tool", MIDDLE, text, END])
        return results

    def opening(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.opening`."""
        thinking = {"k2": []}.get(self.config.version, [THINK] if self.config.thinking else [THINK, THOUGHT])
        return [ASSISTANT, "assistant", MIDDLE, *thinking]

    def reply(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.reply`. Raises `ValueError` for reasoning where a reply has none."""
        message = messages[index]
        reasoning = message.get("reasoning_content") or ""
        if reasoning and not self._thinks:
            raise ValueError(
                f"message {index}: reasoning_content, but this Kimi does not think (K2, or thinking = false)"
            )
        pieces: list[Piece] = [reasoning, THOUGHT] if self._thinks else []
        pieces.append(content_text(message, index))
        calls = message.get("tool_calls") or ()
        if not calls:
            return pieces
        before = sum(len(m.get("tool_calls") or ()) for m in messages[:index])
        pieces.append(SECTION)
        for number, call in enumerate(calls, before):
            name, arguments = name_of(call)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            pieces += [CALL, call.get("id") or f"functions.{name}:{number}", ARGUMENTS, text or "{}", CALL_END]
        return [*pieces, SECTION_END]

    def read(self, text: str, tools: Tools) -> ParsedReply:
        """See `MarkedFamily.read`."""
        reasoning, _, rest = text.partition(self.marks[THOUGHT]) if self._thinks else ("", "", text)
        content, calls, malformed = take_calls(rest, self._block, self._read_call)
        return ParsedReply(
            content=self.marks.spelled(content),
            reasoning=self.marks.spelled(reasoning) or None,
            tool_calls=tuple(calls),
            malformed=tuple(map(self.marks.spelled, malformed)),
        )

    def read_partial(self, text: str) -> tuple[str | None, str]:
        """See `MarkedFamily.read_partial`."""
        reasoning, close, rest = text.partition(self.marks[THOUGHT]) if self._thinks else ("", "", text)
        if self._thinks and not close:
            return self.marks.before(reasoning), ""
        return self.marks.spelled(reasoning), self.marks.before(rest)

    def _read_call(self, block: re.Match[str]) -> list[dict[str, Any]] | None:
        call_id = (block[1] or "").strip()
        name = _ID.fullmatch(call_id)
        arguments = (block[2] or "").strip()
        try:
            end = read_object(arguments, 0)[1]
        except ValueError:
            return None
        if name is None or end != len(arguments):
            return None
        return [{"id": call_id, **tool_call(name[1], arguments)}]

    def _offered(self, tools: Tools) -> str:
        if self.config.version == "k2":
            return json.dumps(list(tools), separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        return declarations(tools)
