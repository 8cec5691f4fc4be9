"""Inkling: `<|message_ROLE|><|content_KIND|>…<|end_message|>` blocks; a reply is a row of them, each of one kind.

Format: TMLv0, as Thinking Machines' own package `tml-renderers` writes and reads it, in the order of the published chat
template (tools first, then the system's messages, then the effort; the prompt ends with `<|message_model|>`), as the
package `renderers` writes that. The template keeps all reasoning. Text alone: images and audio are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.families import Evidence, ParsedReply, Segment
from miles_core.tito.families.calls import Tools, name_of
from miles_core.tito.families.chatml import content_text
from miles_core.tito.families.hermes import read_object
from miles_core.tito.families.marked import MarkedFamily, Marks, Piece, Token, as_segments, tool_call

__all__ = ["InklingConfig", "InklingFamily"]

SYSTEM, USER, MODEL, TOOL = map(
    Token, ("<|message_system|>", "<|message_user|>", "<|message_model|>", "<|message_tool|>")
)
TEXT, THINKING, XML = map(Token, ("<|content_text|>", "<|content_thinking|>", "<|content_xml|>"))
INVOKE, END = Token("<|content_invoke_tool_json|>"), Token("<|end_message|>")
STOP = Token("<|content_model_end_sampling|>")


class InklingConfig(ComponentConfig):
    """Section `[model.family]` of `inkling`."""

    reasoning_effort: float = Field(default=0.9, ge=0.0, le=0.99)
    """How much to think, which the prompt says; 0.9 is the model's own default."""


class InklingFamily(MarkedFamily[InklingConfig]):
    """Inkling and Inkling-Small. An empty content beside reasoning or calls is none."""

    Config = InklingConfig
    evidence: Evidence = "template-equal"
    marks = Marks(MODEL, TEXT, THINKING, INVOKE, END)
    stops = (STOP, Token("<|endoftext|>", tag=True))

    def head(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> tuple[list[Segment], int]:
        """See `MarkedFamily.head`."""
        out: list[Segment] = []
        if tools:
            declared = _json([_declaration(tool) for tool in tools])
            out += as_segments([SYSTEM, "tool_declare", XML, declared, END], role="system", message=-1)
        taken = 0
        while taken < len(messages) and messages[taken].get("role") in ("system", "developer"):
            pieces = self.said("system", content_text(messages[taken], taken), taken)
            out += as_segments(pieces, role="system", message=taken)
            taken += 1
        effort = self.config.reasoning_effort
        text = f"Thinking effort level: {effort or 0}"
        return [*out, *as_segments([SYSTEM, TEXT, text, END], role="system", message=taken - 1)], taken

    def said(self, role: str, text: str, index: int) -> list[Piece]:
        """See `MarkedFamily.said`."""
        return [SYSTEM if role == "system" else USER, TEXT, text, END]

    def run(self, messages: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[list[Piece]]:
        """See `MarkedFamily.run`. A result bears the name of its tool; its call tells it where the result does not."""
        return [[TOOL, _tool_name(messages, i), TEXT, content_text(messages[i], i), END] for i in indices]

    def opening(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.opening`."""
        return [MODEL]

    def reply(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.reply`. The prompt brings the `<|message_model|>` of the first block."""
        message = messages[index]
        reasoning, content = message.get("reasoning_content") or "", content_text(message, index)
        calls = message.get("tool_calls") or ()
        blocks: list[list[Piece]] = [[THINKING, reasoning, END]] if reasoning else []
        if content or not (reasoning or calls):
            blocks.append([TEXT, content, END])
        for call in calls:
            name, arguments = name_of(call)
            payload = f'{{"name":{_json(name)},"args":{_json(_arguments(name, arguments))}}}'
            blocks.append([name, INVOKE, payload, END])
        first, *rest = blocks
        return [*first, *(piece for block in rest for piece in (MODEL, *block))]

    def read(self, text: str, tools: Tools) -> ParsedReply:
        """See `MarkedFamily.read`."""
        reasoning, content, malformed = "", "", []
        calls: list[Mapping[str, Any]] = []
        for kind, body, block in self._blocks(text):
            if kind == self.marks[THINKING]:
                reasoning += self.marks.spelled(body)
            elif kind == self.marks[TEXT]:
                content += self.marks.spelled(body)
            elif (call := self._read_call(block)) is not None:
                calls.append(call)
            else:
                content += self.marks.spelled(block)
                malformed += [self.marks.spelled(block)] if self.marks[INVOKE] in block else []
        return ParsedReply(
            content=content, reasoning=reasoning or None, tool_calls=tuple(calls), malformed=tuple(malformed)
        )

    def read_partial(self, text: str) -> tuple[str | None, str]:
        """See `MarkedFamily.read_partial`."""
        reasoning = content = ""
        for kind, body, _ in self._blocks(text):
            if kind == self.marks[THINKING]:
                reasoning += self.marks.before(body)
            elif kind == self.marks[TEXT]:
                content += self.marks.before(body)
            else:
                break
            if self.marks.before(body) != body:
                break
        return reasoning, content

    def _blocks(self, text: str) -> Iterator[tuple[str, str, str]]:
        """(mark of its kind or "", what follows that, all of it) of each block, its `<|message_model|>` and end left
        out."""
        for part in text.split(self.marks[END]):
            block = part.removeprefix(self.marks[MODEL])
            if block:
                kind = block[0] if block[0] in (self.marks[THINKING], self.marks[TEXT]) else ""
                yield kind, block[len(kind) :], block

    def _read_call(self, block: str) -> dict[str, Any] | None:
        name, mark, payload = block.partition(self.marks[INVOKE])
        try:
            members, end = read_object(payload, 0)
            named, arguments = members["name"][0], members["args"][0]
            written = _json(arguments)
        except (ValueError, KeyError):
            return None
        whole = mark and end == len(payload) and members.keys() == {"name", "args"}
        if not whole or not isinstance(named, str) or not named or named != name or not isinstance(arguments, dict):
            return None
        return tool_call(named, written)


def _json(value: Any) -> str:
    """Compact, keys sorted. Raises `ValueError` for numbers that JSON has not."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _declaration(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {
        "description": function.get("description") or "",
        "name": function.get("name"),
        "parameters": function.get("parameters") or {},
        "type": tool.get("type") or "function",
    }


def _arguments(name: str, arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ValueError(f"arguments of the tool call {name!r}: expected a JSON object, found {arguments!r:.200}")
    return read


def _tool_name(messages: Sequence[Mapping[str, Any]], index: int) -> str:
    own = messages[index].get("name")
    if own:
        return str(own)
    wanted = messages[index].get("tool_call_id")
    for message in reversed(messages[:index]):
        for call in message.get("tool_calls") or ():
            if wanted and call.get("id") == wanted:
                return name_of(call)[0]
    return ""
