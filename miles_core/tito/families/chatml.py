"""ChatML: `<|im_start|>role\\n … <|im_end|>\\n`, Hermes tool calls. SmolLM2, Qwen2.5 and whatever follows them.

Siblings subclass `ChatMLFamily` and override the hooks below `segments`: what a system prompt and a tool result look
like, another call format (`calls`); families with thinking subclass `thinking.ThinkingFamily`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.families import Evidence, ModelFamily, ParsedReply, Segment, Tokenizer
from miles_core.tito.families.calls import OPEN, CallFormat, Piece, as_segments
from miles_core.tito.families.hermes import HermesCalls, tool_prompt_pieces

__all__ = ["ChatMLConfig", "ChatMLFamily", "content_text"]

START, END = "<|im_start|>", "<|im_end|>"


class ChatMLConfig(ComponentConfig):
    """Section `[model.family]` of the ChatML families."""

    default_system: str | None = None
    """System prompt of a conversation that brings none; none is added when unset. The official templates add
    `You are a helpful AI assistant named SmolLM, trained by Hugging Face` (SmolLM2) and
    `You are Qwen, created by Alibaba Cloud. You are a helpful assistant.` (Qwen2.5)."""


ChatMLConfigT = TypeVar("ChatMLConfigT", bound=ChatMLConfig)


class ChatMLFamily(ModelFamily[ChatMLConfigT]):
    """One block a message; a run of tool results is one user block.

    A block of tool results is rendered when it is closed, by a message of another role or the generation prompt:
    another result may still join it, and no token may change then. Assistant text that the model samples starts at
    a token boundary, as it does when it is sampled.
    """

    Config = ChatMLConfig
    evidence: Evidence = "verified"
    roles: ClassVar[Mapping[str, str]] = {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
    }
    """Roles that a message may have beside `tool`, and what they are called in the rendering."""

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> list[Segment]:
        """See `ModelFamily.segments`. Raises `ValueError` for other roles than system, developer, user, assistant and
        tool, for content that is no text, and for reasoning that this family has no place for."""
        out: list[Segment] = []
        system_first = bool(messages) and self.roles.get(messages[0].get("role", "")) == "system"
        if messages or add_generation_prompt:
            pieces = self.system_pieces(self.said(messages[0], 0) if system_first else None, tools)
            out += _block("system", pieces, message=0 if system_first else -1) if pieces else []
        results: list[tuple[int, str]] = []
        for index, message in enumerate(messages):
            role = message.get("role", "")
            if role == "tool":
                results.append((index, self.said(message, index)))
                continue
            out += self._tool_results(results)
            results = []
            if role not in self.roles:
                raise ValueError(f"message {index}: role {role!r}; allowed: {', '.join([*self.roles, 'tool'])}")
            if role == "assistant":
                out += self.assistant_segments(message, index)
            elif index > 0 or not system_first:
                out += _block(self.roles[role], [(self.said(message, index), False)], message=index)
        if add_generation_prompt:
            out += self._tool_results(results)
            out += self.opening(len(messages))
        return out

    @property
    def calls(self) -> CallFormat:
        """How tool calls are written."""
        return _HERMES

    def said(self, message: Mapping[str, Any], index: int) -> str:
        """The text of a message that nobody sampled."""
        return content_text(message, index)

    def system_pieces(self, given: str | None, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """The system block of a conversation that starts with the system prompt `given`; empty: it has none."""
        text = self.config.default_system if given is None else given
        pieces: list[Piece] = [] if text is None else [(text, False)]
        if tools:
            pieces += [] if text is None else [("\n\n", False)]
            pieces += tool_prompt_pieces(tools)
        return pieces

    def result_pieces(self, text: str, *, first: bool) -> list[Piece]:
        """One tool result, behind the `user` that opens its block when it is the `first` there."""
        return [("\n", False), ("<tool_response>", True), (f"\n{text}\n", False), ("</tool_response>", True)]

    def opening(self, index: int) -> list[Segment]:
        """What stands before the assistant's own text: the end of every prompt."""
        return _header("assistant", index)

    def assistant_segments(self, message: Mapping[str, Any], index: int) -> list[Segment]:
        """An assistant's message: header, what it sampled (its stop token included), the newline behind it."""
        if message.get("reasoning_content"):
            raise ValueError(
                f"message {index}: reasoning_content, but this family has no place for it; "
                "keep the thinking in the content, or choose the family of a reasoning model"
            )
        pieces = self.calls.pieces(content_text(message, index), message.get("tool_calls") or ())
        return _block("assistant", pieces, message=index, sampled=True)

    def parse(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ParsedReply:
        """See `ModelFamily.parse`."""
        stops = {tokenizer.added(token) for token in self.stop_tokens()}
        end = len(ids)
        while end and ids[end - 1] in stops:
            end -= 1
        return self.parse_text(tokenizer.decode(ids[:end]), tools=tools)

    def parse_text(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
        """The message that an assistant's text, without stop tokens, spells."""
        content, calls, malformed = self.calls.extract(text, tools)
        return ParsedReply(content=content, tool_calls=calls, malformed=malformed)

    def suffix(
        self, messages: Sequence[Mapping[str, Any]], *, after: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """See `ModelFamily.suffix`. A block is rendered alike whatever stands before it."""
        new = [{"role": "assistant"}, *messages[after + 1 :]]  # an assistant closes what came before, as it did there
        return [
            segment.behind(after) for segment in self.segments(new, add_generation_prompt=True) if segment.message > 0
        ]

    def partial(self, ids: Sequence[int], tokenizer: Tokenizer) -> ParsedReply:
        """See `ModelFamily.partial`."""
        return self.parse_partial(tokenizer.decode(ids).rstrip("\ufffd"))  # a character may be half sampled

    def parse_partial(self, text: str) -> ParsedReply:
        """What is certain of a message that begins with `text`, stop tokens included or not."""
        return ParsedReply(content=self.calls.certain(text, (OPEN, END)))

    def junction(self, sampled: Sequence[int], tokenizer: Tokenizer) -> tuple[int, list[int]]:
        """Adds the newline behind a sampled `<|im_end|>`; both when the turn ended some other way (a stop string)."""
        end = tokenizer.special(END)
        newline = tokenizer.encode("\n")
        return 0, newline if len(sampled) and sampled[-1] == end else [end, *newline]

    def stop_tokens(self) -> tuple[str, ...]:
        return (END,)

    def _tool_results(self, results: Sequence[tuple[int, str]]) -> list[Segment]:
        """Consecutive tool results as one user block."""
        if not results:
            return []
        first, last = results[0][0], results[-1][0]
        out = [Segment(START, special=True, role="tool", message=first), Segment("user", role="tool", message=first)]
        for index, text in results:
            pieces = self.result_pieces(text, first=index == first)
            out += as_segments(pieces, role="tool", message=index)
        return [*out, Segment(END, special=True, role="tool", message=last), Segment("\n", role="tool", message=last)]


_HERMES = HermesCalls()


def content_text(message: Mapping[str, Any], index: int) -> str:
    """The text of a message. Raises `ValueError` for blocks that are not text: a text model cannot see them."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(
            f"message {index}: content is {type(content).__name__}, expected text or a list of text blocks"
        )
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise ValueError(f"message {index}: content block of type {kind!r}; this family reads text blocks alone")
    return "".join(block["text"] for block in content)


def _header(role: str, message: int) -> list[Segment]:
    return [
        Segment(START, special=True, role=role, message=message),
        Segment(f"{role}\n", role=role, message=message),
    ]


def _block(role: str, pieces: Sequence[Piece], *, message: int, sampled: bool = False) -> list[Segment]:
    return [
        *_header(role, message),
        *as_segments(pieces, role=role, message=message, sampled=sampled),
        Segment(END, special=True, role=role, message=message, sampled=sampled),
        Segment("\n", role=role, message=message),
    ]
