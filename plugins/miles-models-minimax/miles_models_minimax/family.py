"""MiniMax M2: `]~b]role\\n … [e~[\\n`, thinking that the prompt opens, `<invoke>` blocks in `<minimax:tool_call>`.

Format: the chat template of MiniMax-M2 and M2.5, as the package `renderers` writes it and SGLang reads it. The official
template drops the reasoning of earlier turns; this family keeps it, and closes the thinking that its prompts open also
where a reply has none.
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
from miles_core.tito.families.marked import (
    MarkedFamily,
    Marks,
    Piece,
    Token,
    argument_text,
    as_segments,
    leading_system,
    pieces_of,
    take_calls,
    tool_call,
)
from miles_core.tito.families.xml_calls import members_of

__all__ = ["MiniMaxConfig", "MiniMaxFamily"]

BEGIN, ROLE, END = Token("]~!b["), Token("]~b]"), Token("[e~[")
THINK, THOUGHT = Token("<think>"), Token("</think>")
CALL, CALLED = Token("<minimax:tool_call>"), Token("</minimax:tool_call>")

_OFFER = "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
_LISTED = "Here are the tools available in JSONSchema format:\n\n<tools>\n"
_HOW = (
    "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n<minimax:tool_call>\n"
    '<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
    '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'
)
_INVOKE = re.compile(r'\s*<invoke name="([^"\n]+)">\s*')
_PARAMETER = re.compile(
    # A value ends where something follows that only a parameter's end has behind it.
    r'<parameter name="([^"\n]+)">(.*?)</parameter>\s*(?=<parameter name="[^"\n]+">|</invoke>)',
    re.DOTALL,
)
_INVOKED = re.compile(r"</invoke>\s*")


class MiniMaxConfig(ComponentConfig):
    """Section `[model.family]` of `minimax`."""

    version: Literal["m2", "m2.5", "m2.7"] = "m2.5"
    """Which MiniMax. All are written alike but for the name in their own system prompt."""
    default_system: str | None = None
    """System prompt of a conversation that brings none; the model's own when unset."""


class MiniMaxFamily(MarkedFamily[MiniMaxConfig]):
    """MiniMax M2, M2.5 and M2.7. Every reply begins inside the thinking that the prompt opens."""

    Config = MiniMaxConfig
    evidence: Evidence = "verified"
    marks = Marks(THINK, THOUGHT, CALL, CALLED)
    stops = (END,)
    behind = "\n"

    _block = re.compile(f"{marks[CALL]}({marks.text}){marks[CALLED]}?")

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """MiniMax M2.5."""
        return Example(inputs=(CALL.name, CALLED.name))

    def head(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> tuple[list[Segment], int]:
        """See `MarkedFamily.head`. There is a system prompt always."""
        given = leading_system(messages)
        name = f"MiniMax-{self.config.version.upper()}"
        own = f"You are a helpful assistant. Your name is {name} and is built by MiniMax."
        pieces: list[Piece] = [BEGIN, ROLE, "system\n", given or self.config.default_system or own]
        if tools:
            listing = (f"<tool>{json.dumps(t.get('function', t), ensure_ascii=False)}</tool>\n" for t in tools)
            pieces += [_OFFER, _LISTED, *listing, *pieces_of(_HOW, (CALL, CALLED))]
        pieces += [END, "\n"]
        taken = int(given is not None)
        return as_segments(pieces, role="system", message=taken - 1), taken

    def said(self, role: str, text: str, index: int) -> list[Piece]:
        """See `MarkedFamily.said`. Raises `ValueError` for a later message of the system."""
        if role == "system":
            raise ValueError(
                f"message {index}: a system message behind the first message, for which MiniMax has no place; "
                "put its text into the first message, or send it as the user's"
            )
        return [ROLE, f"user\n{text}", END, "\n"]

    def run(self, messages: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[list[Piece]]:
        """See `MarkedFamily.run`. A run of results is one block."""
        results: list[list[Piece]] = [[f"\n<response>{content_text(messages[i], i)}</response>"] for i in indices]
        results[0] = [ROLE, "tool", *results[0]]
        results[-1] += [END, "\n"]
        return results

    def opening(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.opening`."""
        return [ROLE, "ai\n", THINK, "\n"]

    def reply(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.reply`."""
        message = messages[index]
        pieces: list[Piece] = [f"{message.get('reasoning_content') or ''}\n", THOUGHT, "\n\n"]
        pieces.append(content_text(message, index))
        calls = message.get("tool_calls") or ()
        if not calls:
            return pieces
        pieces += ["\n", CALL, "\n"]
        for call in calls:
            name, arguments = name_of(call)
            body = "".join(
                f'<parameter name="{key}">{value if isinstance(value, str) else text}</parameter>\n'
                for key, (value, text) in members_of(name, arguments).items()
            )
            pieces.append(f'<invoke name="{name}">\n{body}</invoke>\n')
        return [*pieces, CALLED]

    def read(self, text: str, tools: Tools) -> ParsedReply:
        """See `MarkedFamily.read`."""
        reasoning, _, rest = text.partition(self.marks[THOUGHT])
        rest = rest.removeprefix("\n").removeprefix("\n")
        content, calls, malformed = take_calls(rest, self._block, lambda block: self._read_calls(block, tools))
        return ParsedReply(
            content=self.marks.spelled(content.removesuffix("\n") if calls else content),
            reasoning=self.marks.spelled(reasoning.removesuffix("\n")) or None,
            tool_calls=tuple(calls),
            malformed=tuple(map(self.marks.spelled, malformed)),
        )

    def read_partial(self, text: str) -> tuple[str | None, str]:
        """See `MarkedFamily.read_partial`."""
        reasoning, close, rest = text.partition(self.marks[THOUGHT])
        if not close:
            return self.marks.before(reasoning).removesuffix("\n"), ""
        rest = rest.removeprefix("\n").removeprefix("\n")
        return self.marks.spelled(reasoning.removesuffix("\n")), self.marks.before(rest).removesuffix("\n")

    def _read_calls(self, block: re.Match[str], tools: Tools) -> list[dict[str, Any]] | None:
        """The calls of a block, None where one of them, or anything else in it, is malformed."""
        text, position, calls = block[1], 0, []
        while (invoke := _INVOKE.match(text, position)) is not None:
            position = invoke.end()
            values: dict[str, str] = {}
            while (parameter := _PARAMETER.match(text, position)) is not None and parameter[1] not in values:
                values[parameter[1]] = parameter[2]
                position = parameter.end()
            end = _INVOKED.match(text, position)
            if end is None:
                return None
            position = end.end()
            calls.append(tool_call(invoke[1], argument_text(values, tools, invoke[1])))
        whole = calls and position == len(text) and block[0].endswith(self.marks[CALLED])
        return calls if whole else None
