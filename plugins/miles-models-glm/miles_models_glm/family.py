"""GLM: `[gMASK]<sop>`, a token a role, `<think>` blocks, tool calls as pairs of `<arg_key>` and `<arg_value>`.

No token ends a turn: the model samples the role that comes next, `<|user|>` or `<|observation|>`. That token opens the
next message, so the junction drops it, and the next message brings the one that is right.

Format: the chat templates of GLM-4.5 (in the trl wheel), and of 4.7, 5, 5.1 and 5.2 as the packages `renderers` and
`tml-renderers` write them. The official templates drop earlier reasoning from history; this family keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import model_validator

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.families import Evidence, ParsedReply, Segment, Tokenizer
from miles_core.tito.families.calls import Tools, name_of
from miles_core.tito.families.chatml import content_text
from miles_core.tito.families.marked import (
    MarkedFamily,
    Marks,
    Piece,
    Token,
    argument_text,
    as_segments,
    pieces_of,
    take_calls,
    tool_call,
)
from miles_core.tito.families.xml_calls import members_of

__all__ = ["GlmConfig", "GlmFamily"]

GMASK, SOP = Token("[gMASK]"), Token("<sop>")
SYSTEM, USER, ASSISTANT, OBSERVATION = map(Token, ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"))
THINK, THOUGHT = Token("<think>"), Token("</think>")
CALL, CALLED = Token("<tool_call>"), Token("</tool_call>")
KEY, KEYED, VALUE, VALUED = map(Token, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
RESPONSE, RESPONDED = Token("<tool_response>"), Token("</tool_response>")
NO_THINK = Token("/nothink", tag=True)

_OFFER = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_PAIRS = (
    ("<arg_key>{arg-key-1}</arg_key>", "<arg_value>{arg-value-1}</arg_value>"),
    ("<arg_key>{arg-key-2}</arg_key>", "<arg_value>{arg-value-2}</arg_value>"),
)
_HOW = "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"


class GlmConfig(ComponentConfig):
    """Section `[model.family]` of `glm`."""

    version: Literal["4.5", "4.6", "4.7", "5", "5.1", "5.2"]
    """Which GLM. 4.6 is written as 4.5."""
    thinking: bool = True
    """False: the prompt says that there is no thinking (`enable_thinking = false` of the official templates)."""
    reasoning_effort: Literal["high", "max"] = "max"
    """What the prompt of 5.2 says of it; other versions have no place for it."""

    @model_validator(mode="after")
    def _what_the_version_has(self) -> Self:
        if self.version == "5.2" and not self.thinking:
            raise ValueError("thinking = false: the format of GLM 5.2 is known with thinking alone; leave it out")
        if self.version != "5.2" and self.reasoning_effort != "max":
            raise ValueError(f"reasoning_effort: GLM {self.version} has none; leave it out, or set version = '5.2'")
        return self


class GlmFamily(MarkedFamily[GlmConfig]):
    """GLM 4.5 to 5.2. A sampled `<|user|>` or `<|observation|>` ends a turn and opens the next message."""

    Config = GlmConfig
    evidence: Evidence = "template-equal"
    marks = Marks(THINK, THOUGHT, CALL, CALLED, KEY, KEYED, VALUE, VALUED)
    stops = (USER, OBSERVATION, Token("<|endoftext|>", tag=True))

    _block = re.compile(f"{marks[CALL]}[^{marks[CALL]}]*?(?:{marks[CALLED]}|(?={marks[CALL]})|\\Z)", re.DOTALL)
    _pair = re.compile(f"{marks[KEY]}({marks.text}){marks[KEYED]}\\s*{marks[VALUE]}({marks.text}){marks[VALUED]}\\s*")
    _name = re.compile(f"{marks[CALL]}({marks.text})")

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """GLM 4.5."""
        return Example(settings={"version": "4.5"}, inputs=tuple(t.name for t in (THINK, THOUGHT, USER, OBSERVATION)))

    @property
    def _spaced(self) -> bool:
        """4.5 and 4.6 put a newline behind everything; 4.7 and later none."""
        return self.config.version in ("4.5", "4.6")

    @property
    def _newline(self) -> str:
        return "\n" if self._spaced else ""

    def head(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> tuple[list[Segment], int]:
        """See `MarkedFamily.head`."""
        pieces: list[Piece] = [GMASK, SOP]
        if self.config.version == "5.2":
            pieces += [SYSTEM, f"Reasoning Effort: {self.config.reasoning_effort.capitalize()}"]
        if tools:
            end = self._newline
            pairs = "".join(f"{key}{end}{value}{end}" for key, value in _PAIRS)
            how = f"{_HOW}<tool_call>{{function-name}}{end}{pairs}...{end}</tool_call>"
            pieces += [SYSTEM, _OFFER, *(f"{self._offered(tool)}\n" for tool in tools)]
            pieces += pieces_of(how, (CALL, CALLED, KEY, KEYED, VALUE, VALUED))
        return as_segments(pieces, role="system", message=-1), 0

    def said(self, role: str, text: str, index: int) -> list[Piece]:
        """See `MarkedFamily.said`."""
        if role == "system":
            return [SYSTEM, self._newline + text]
        silent = self._spaced and not self.config.thinking and not text.endswith(NO_THINK.name)
        return [USER, self._newline + text, *([NO_THINK] if silent else [])]

    def run(self, messages: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[list[Piece]]:
        """See `MarkedFamily.run`."""
        end = self._newline
        results: list[list[Piece]] = [
            [end, RESPONSE, f"{end}{content_text(messages[i], i)}{end}", RESPONDED] for i in indices
        ]
        return [[OBSERVATION, *results[0]], *results[1:]]

    def block(self, messages: Sequence[Mapping[str, Any]], index: int, pieces: Sequence[Piece]) -> list[Segment]:
        """See `MarkedFamily.block`. The role behind an assistant's message is what ended it: the assistant samples it,
        and fine-tuning trains on it."""
        first, *rest = super().block(messages, index, pieces)
        ends = index > 0 and messages[index - 1].get("role") == "assistant" and first.text in self.stop_tokens()
        return [first._replace(sampled=True) if ends else first, *rest]

    def ending(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Segment]:
        """See `MarkedFamily.ending`. Only where nothing follows: otherwise the next message brings its own."""
        if index + 1 < len(messages):
            return []
        stop = OBSERVATION if messages[index].get("tool_calls") else USER
        return as_segments([stop], role="assistant", message=index, sampled=True)

    def junction(self, sampled: Sequence[int], tokenizer: Tokenizer) -> tuple[int, list[int]]:
        """Drops a sampled role: the next message opens with its own. `<|endoftext|>` and what a stop string ended stay
        as they are."""
        roles = (tokenizer.added(USER.name), tokenizer.added(OBSERVATION.name))
        return int(bool(len(sampled)) and sampled[-1] in roles), []

    def opening(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.opening`."""
        if self._spaced:
            return [ASSISTANT] if self.config.thinking else [ASSISTANT, "\n", THINK, THOUGHT]
        return [ASSISTANT, THINK if self.config.thinking else THOUGHT]

    def reply(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """See `MarkedFamily.reply`. Raises `ValueError` for reasoning where a reply has none."""
        message, end = messages[index], self._newline
        reasoning = self._trimmed(message.get("reasoning_content") or "")
        pieces: list[Piece] = []
        if self.config.thinking:
            pieces += ["\n", THINK, reasoning, THOUGHT] if self._spaced else [reasoning, THOUGHT]
        elif reasoning:
            raise ValueError(
                f"message {index}: reasoning_content, but with thinking = false no reply has any; leave it out"
            )
        content = content_text(message, index).strip()
        if content:
            pieces.append(end + content)
        for call in message.get("tool_calls") or ():
            name, arguments = name_of(call)
            pieces += [end, CALL, name + end]
            for key, (value, text) in members_of(name, arguments).items():
                pieces += [KEY, key, KEYED, end, VALUE, value if isinstance(value, str) else text, VALUED, end]
            pieces.append(CALLED)
        return pieces

    def read(self, text: str, tools: Tools) -> ParsedReply:
        """See `MarkedFamily.read`."""
        reasoning, rest, _ = self._split(text)
        content, calls, malformed = take_calls(rest, self._block, lambda block: self._read_call(block[0], tools))
        return ParsedReply(
            content=self.marks.spelled(content.strip()),
            reasoning=self.marks.spelled(self._trimmed(reasoning)) or None,
            tool_calls=tuple(calls),
            malformed=tuple(map(self.marks.spelled, malformed)),
        )

    def read_partial(self, text: str) -> tuple[str | None, str]:
        """See `MarkedFamily.read_partial`."""
        reasoning, rest, closed = self._split(text)
        if not closed:
            return self._trimmed(self.marks.before(reasoning)), ""
        return self.marks.spelled(self._trimmed(reasoning)), self.marks.before(rest).strip()

    def _split(self, text: str) -> tuple[str, str, bool]:
        """(reasoning, what follows it, whether it is closed)."""
        if not self.config.thinking:
            return "", text, True
        if self._spaced:
            text = text.lstrip()
            if not text.startswith(self.marks[THINK]):
                return "", text, True
            text = text[1:]
        reasoning, close, rest = text.partition(self.marks[THOUGHT])
        return reasoning, rest, bool(close)

    def _trimmed(self, reasoning: str) -> str:
        return reasoning if self.config.version == "5.2" else reasoning.strip()

    def _read_call(self, block: str, tools: Tools) -> list[dict[str, Any]] | None:
        head = self._name.match(block)
        name = head[1].strip() if head else ""
        values: dict[str, str] = {}
        position = head.end() if head else 0
        while (pair := self._pair.match(block, position)) is not None and pair[1] not in values:
            values[pair[1]] = pair[2]
            position = pair.end()
        if not name or block[position:] != self.marks[CALLED]:
            return None
        return [tool_call(name, argument_text(values, tools, name))]

    def _offered(self, tool: Mapping[str, Any]) -> str:
        if self.config.version in ("5.1", "5.2"):
            function = tool.get("function", tool)
            tool = {key: value for key, value in function.items() if key not in ("defer_loading", "strict")}
        return json.dumps(tool, ensure_ascii=False)
