"""DeepSeek: `<｜User｜>…<｜Assistant｜>…<｜end▁of▁sentence｜>`, thinking that the prompt opens or closes.

| version | calls | results |
|---|---|---|
| 3.1 | tokens of a section, JSON arguments | a token around each |
| 3.2 | DSML, `function_calls` | `<function_results>` behind the calls |
| 4 | DSML, `tool_calls` | `<tool_result>` in the user's turn |

Format: DeepSeek's encoder of V3.2 (`encoding_dsv32.py` of its repository), its package `deepseek-recipe` for V4, and
the chat template of V3.1 as `tml-renderers` writes it. They drop earlier reasoning from history; this family keeps it.
"""

from __future__ import annotations

import json
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
    pieces_of,
    section_of,
    take_calls,
    tool_call,
)
from miles_models_deepseek.dsml import DSML, DsmlCalls
from miles_models_deepseek.offers import OFFERS

__all__ = ["DeepSeekConfig", "DeepSeekFamily"]

BEGIN, END = Token("<｜begin▁of▁sentence｜>"), Token("<｜end▁of▁sentence｜>")
USER, ASSISTANT = Token("<｜User｜>"), Token("<｜Assistant｜>")
THINK, THOUGHT = Token("<think>"), Token("</think>")
CALLS, CALLS_END = Token("<｜tool▁calls▁begin｜>"), Token("<｜tool▁calls▁end｜>")
CALL, SEPARATOR, CALL_END = map(Token, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
OUTPUT, OUTPUT_END = Token("<｜tool▁output▁begin｜>"), Token("<｜tool▁output▁end｜>")


class DeepSeekConfig(ComponentConfig):
    """Section `[model.family]` of `deepseek`."""

    version: Literal["3.1", "3.2", "4"]
    """Which DeepSeek."""
    thinking: bool = False
    """True: prompts open the thinking. V3.1 calls tools only without it."""


class DeepSeekFamily(MarkedFamily[DeepSeekConfig]):
    """DeepSeek V3.1, V3.2 and V4. Reasoning and content are kept to the byte."""

    Config = DeepSeekConfig
    evidence: Evidence = "template-equal"
    marks = Marks(THINK, THOUGHT, CALLS, CALLS_END, CALL, SEPARATOR, CALL_END, DSML)
    stops = (END,)

    _section = section_of(marks, CALLS, CALL, SEPARATOR, CALL_END, CALLS_END)
    _dsml = {  # noqa: RUF012
        "3.2": DsmlCalls("function_calls", marks[DSML]),
        "4": DsmlCalls("tool_calls", marks[DSML]),
    }

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """DeepSeek V4, thinking."""
        return Example(settings={"version": "4", "thinking": True}, inputs=(DSML.name,))

    def joins(self, role: str) -> bool:
        """See `MarkedFamily.joins`. V4 has results and questions in one turn of the user."""
        return role == "tool" or (role == "user" and self.config.version == "4")

    def head(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> tuple[list[Segment], int]:
        """See `MarkedFamily.head`. Raises `ValueError` for tools where the format has no offer of them."""
        taken = 0
        while taken < len(messages) and messages[taken].get("role") in ("system", "developer"):
            taken += 1
        between = "\n\n" if self.config.version == "3.1" else ""
        pieces: list[Piece] = [BEGIN, between.join(content_text(messages[i], i) for i in range(taken))]
        if tools:
            offer = OFFERS.get(self.config.version)
            if offer is None:
                raise ValueError(
                    "tools: the chat template of DeepSeek V3.1 has no place for them; describe them in the system "
                    "prompt, and send none"
                )
            before, behind = offer
            listing = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
            tokens = (DSML, THINK, THOUGHT)
            pieces += ["\n\n", *pieces_of(before, tokens), listing, *pieces_of(behind, tokens)]
        return as_segments(pieces, role="system", message=0 if taken else -1), taken

    def said(self, role: str, text: str, index: int) -> list[Piece]:
        """See `MarkedFamily.said`. Raises `ValueError` for a later message of the system."""
        if role == "system":
            raise ValueError(
                f"message {index}: a system message behind other messages, for which DeepSeek has no place; put its "
                "text into the first message, or send it as the user's"
            )
        return [USER, text]

    def run(self, messages: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[list[Piece]]:
        """See `MarkedFamily.run`. Raises `ValueError` for results where the model thinks and cannot call."""
        texts = [content_text(messages[i], i) for i in indices]
        if self.config.version == "3.1":
            if self.config.thinking:
                raise ValueError(f"message {indices[0]}: V3.1 calls tools without thinking; set thinking = false")
            return [[OUTPUT, text, OUTPUT_END] for text in texts]
        if self.config.version == "3.2":
            results: list[list[Piece]] = [[f"\n<result>{text}</result>"] for text in texts]
            results[0] = ["\n\n<function_results>", *results[0]]
            results[-1] += ["\n</function_results>"]
            return results
        parts = [
            f"<tool_result>{text}</tool_result>" if messages[i].get("role") == "tool" else text
            for i, text in zip(indices, texts, strict=True)
        ]
        turn: list[list[Piece]] = [["\n\n", part] for part in parts]
        turn[0] = [USER, parts[0]]
        return turn

    def opening(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.opening`. Behind results the turn goes on, except in V4, where they are the user's."""
        goes_on = index > 0 and messages[index - 1].get("role") == "tool"
        begins = THINK if self.config.thinking else THOUGHT
        if goes_on and self.config.version == "3.1":
            return []
        return ["\n\n", begins] if goes_on and self.config.version == "3.2" else [ASSISTANT, begins]

    def reply(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.reply`. Raises `ValueError` for reasoning where a reply has none."""
        message = messages[index]
        reasoning = message.get("reasoning_content") or ""
        if reasoning and not self.config.thinking:
            raise ValueError(
                f"message {index}: reasoning_content, but with thinking = false no reply has any; leave it out"
            )
        pieces: list[Piece] = [reasoning, THOUGHT] if self.config.thinking else []
        pieces.append(content_text(message, index))
        calls = message.get("tool_calls") or ()
        if not calls:
            return pieces
        if self.config.version != "3.1":
            return [*pieces, *self._dsml[self.config.version].pieces(calls)]
        pieces.append(CALLS)
        for call in calls:
            name, arguments = name_of(call)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            pieces += [CALL, name, SEPARATOR, text or "{}", CALL_END]
        return [*pieces, CALLS_END]

    def read(self, text: str, tools: Tools) -> ParsedReply:
        """See `MarkedFamily.read`."""
        reasoning, _, rest = text.partition(self.marks[THOUGHT]) if self.config.thinking else ("", "", text)
        dsml = self._dsml.get(self.config.version)
        found = take_calls(rest, self._section, _read_call) if dsml is None else dsml.take(rest)
        content, calls, malformed = found
        return ParsedReply(
            content=self.marks.spelled(content),
            reasoning=self.marks.spelled(reasoning) or None,
            tool_calls=tuple(calls),
            malformed=tuple(map(self.marks.spelled, malformed)),
        )

    def read_partial(self, text: str) -> tuple[str | None, str]:
        """See `MarkedFamily.read_partial`."""
        reasoning, close, rest = text.partition(self.marks[THOUGHT]) if self.config.thinking else ("", "", text)
        if self.config.thinking and not close:
            return self.marks.before(reasoning), ""
        dsml = self._dsml.get(self.config.version)
        rest = rest if dsml is None else dsml.certain(rest)
        return self.marks.spelled(reasoning), self.marks.before(rest)


def _read_call(block: Any) -> list[dict[str, Any]] | None:
    name, arguments = (block[1] or "").strip(), (block[2] or "").strip()
    try:
        end = read_object(arguments, 0)[1]
    except ValueError:
        return None
    return [tool_call(name, arguments)] if name and end == len(arguments) else None
