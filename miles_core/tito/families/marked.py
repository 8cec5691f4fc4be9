"""What families with structural tokens of their own share: GLM, Kimi, DeepSeek, MiniMax, Inkling.

Their replies are structured by tokens, so they are read by token: what a model *samples* as `<tool_call>` is structure,
what it *spells* is text. For reading, a reply becomes one string in which each structural token is a single character
that no text can contain, and formats are regular expressions over it.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from miles_core.contracts.component import ConfigT
from miles_core.contracts.families import ModelFamily, ParsedReply, Segment, Tokenizer
from miles_core.tito.families.calls import Tools
from miles_core.tito.families.chatml import content_text
from miles_core.tito.families.xml_calls import json_of, schema_of

__all__ = [
    "MarkedFamily",
    "Marks",
    "Piece",
    "Token",
    "as_segments",
    "leading_system",
    "pieces_of",
    "take_calls",
    "tool_call",
]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """A token by name. A `tag` is spelled as text by vocabularies that lack it."""

    name: str
    tag: bool = False


Piece = str | Token
"""What a family writes: text, or a token."""


def as_segments(pieces: Iterable[Piece], *, role: str, message: int, sampled: bool = False) -> list[Segment]:
    """Pieces with their provenance."""
    return [
        Segment(piece, role=role, message=message, sampled=sampled)
        if isinstance(piece, str)
        else Segment(piece.name, special=True, optional=piece.tag, role=role, message=message, sampled=sampled)
        for piece in pieces
        if piece != ""
    ]


def pieces_of(text: str, tokens: Iterable[Token]) -> list[Piece]:
    """A text of the format itself (never a message's), in which the names of `tokens` are tokens."""
    by_name = {token.name: token for token in tokens}
    parts = re.split(f"({'|'.join(map(re.escape, by_name))})", text)
    return [by_name.get(part, part) for part in parts if part]


class Marks:
    """The tokens that structure replies, each as one character: a lone surrogate, which no decoded text contains."""

    def __init__(self, *tokens: Token) -> None:
        self._chars = {token.name: chr(0xD800 + number) for number, token in enumerate(tokens)}
        self._spelling = {ord(char): name for name, char in self._chars.items()}
        self._last: tuple[Tokenizer, dict[int, str], list[str]] | None = None
        self.any = f"[{''.join(self._chars.values())}]"
        """A regular expression for one mark."""
        self.text = f"[^{''.join(self._chars.values())}]*"
        """A regular expression for text without marks."""

    def __getitem__(self, token: Token) -> str:
        return self._chars[token.name]

    def read(self, ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """The text of `ids` with marks. A token that the vocabulary lacks is read where its name is spelled."""
        by_id, lacking = self._known(tokenizer)
        out: list[str] = []
        start = 0
        for position, token in enumerate(ids):
            if token in by_id:
                out += [tokenizer.decode(ids[start:position]) if start < position else "", by_id[token]]
                start = position + 1
        text = "".join([*out, tokenizer.decode(ids[start:])])
        for name in lacking:
            text = text.replace(name, self._chars[name])
        return text

    def certain(self, ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """As `read`, without the end that another id may still change: half a character, or the start of a name."""
        text = self.read(ids, tokenizer).rstrip("\ufffd")
        starts = (name[:n] for name in self._known(tokenizer)[1] for n in range(1, len(name)))
        return text[: len(text) - max((len(s) for s in starts if text.endswith(s)), default=0)]

    def spelled(self, text: str) -> str:
        """`text` with every mark as its token's name."""
        return text.translate(self._spelling)

    def before(self, text: str) -> str:
        """`text` up to its first mark."""
        return re.split(self.any, text, maxsplit=1)[0]

    def _known(self, tokenizer: Tokenizer) -> tuple[dict[int, str], list[str]]:
        """Marks by id, and the names that the vocabulary lacks; kept for the tokenizer that was asked for last."""
        if self._last is None or self._last[0] is not tokenizer:
            ids = {name: tokenizer.added(name) for name in self._chars}
            by_id = {i: self._chars[name] for name, i in ids.items() if i is not None}
            self._last = (tokenizer, by_id, [name for name, i in ids.items() if i is None])
        return self._last[1:]


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A call in the Chat Completions shape; `arguments` is JSON text."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def argument_text(values: Mapping[str, str], tools: Tools, name: str) -> str:
    """JSON text of arguments whose values the format writes as bare text: the tool's schema says what is no string."""
    members = (
        f"{json.dumps(key, ensure_ascii=False)}: {json_of(value, schema_of(tools, name, key))}"
        for key, value in values.items()
    )
    return f"{{{', '.join(members)}}}"


def section_of(marks: Marks, begin: Token, call: Token, middle: Token, called: Token, end: Token) -> re.Pattern[str]:
    """Calls that stand side by side in a section: each match is one, with what belongs to the section around it. Groups
    1 and 2 are what `middle` parts, and did not take part where the call is malformed."""
    whole = f"({marks.text}){marks[middle]}({marks.text}){marks[called]}"
    return re.compile(f"(?:{marks[begin]}\\s*)?{marks[call]}(?:{whole})?(?:\\s*{marks[end]})?")


def take_calls(
    text: str, block: re.Pattern[str], read: Callable[[re.Match[str]], Sequence[Mapping[str, Any]] | None]
) -> tuple[str, list[Mapping[str, Any]], list[str]]:
    """Split marked text into (what is no call, calls, malformed blocks). `read` gives the calls of a `block`, None for
    a malformed one, which stays where it is. White space behind a call belongs to it."""
    out: list[str] = []
    calls: list[Mapping[str, Any]] = []
    malformed: list[str] = []
    kept = 0
    for match in block.finditer(text):
        found = read(match)
        if found is None:
            malformed.append(match[0])
            continue
        gap = text[kept : match.start()]
        out.append(gap if gap.strip() or not calls else "")
        calls += found
        kept = match.end()
    rest = text[kept:]
    return "".join([*out, rest if rest.strip() or not calls else ""]), calls, malformed


class MarkedFamily(ModelFamily[ConfigT], abc.ABC):
    """One block a message. Subclasses say what stands in the blocks, and read what a reply says.

    Messages whose role `joins` are rendered when something closes their run, another message or the generation prompt:
    one more may join it, and no token may change then. System and developer messages are one role.
    """

    marks: ClassVar[Marks]
    stops: ClassVar[tuple[Token, ...]]
    behind: ClassVar[str] = ""
    """Text that the format puts behind a sampled stop token."""

    @abc.abstractmethod
    def head(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> tuple[list[Segment], int]:
        """What a conversation begins with, and how many of its messages are in it."""

    @abc.abstractmethod
    def said(self, role: str, text: str, index: int) -> list[Piece]:
        """A message of the system or the user, behind the head."""

    def joins(self, role: str) -> bool:
        """Whether consecutive messages of this role make one block."""
        return role == "tool"

    @abc.abstractmethod
    def run(self, messages: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[list[Piece]]:
        """A run of messages whose roles join: the pieces of each."""

    @abc.abstractmethod
    def opening(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """What stands before the assistant's own text in message `index`: the end of every prompt."""

    @abc.abstractmethod
    def reply(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Piece]:
        """What the assistant samples to say message `index`, without the stop token."""

    @abc.abstractmethod
    def read(self, text: str, tools: Tools) -> ParsedReply:
        """The message of a marked text, which has no stop token at its end."""

    @abc.abstractmethod
    def read_partial(self, text: str) -> tuple[str | None, str]:
        """Reasoning and content that are certain of a message whose marked text begins with `text`."""

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> list[Segment]:
        """See `ModelFamily.segments`. Raises `ValueError` for other roles than system, developer, user, assistant and
        tool, and for content that is no text."""
        if not messages and not add_generation_prompt:
            return []
        head, taken = self.head(messages, tools)
        return [*head, *self._body(messages, taken, add_generation_prompt)]

    def suffix(
        self, messages: Sequence[Mapping[str, Any]], *, after: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """See `ModelFamily.suffix`. What a message adds depends on roles alone, so only new messages are rendered."""
        return self._body(messages, after + 1, add_generation_prompt=True)

    def parse(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ParsedReply:
        """See `ModelFamily.parse`."""
        stops = {tokenizer.added(token) for token in self.stop_tokens()}
        end = len(ids)
        while end and ids[end - 1] in stops:
            end -= 1
        return self.read(self.marks.read(ids[:end], tokenizer), tools)

    def partial(self, ids: Sequence[int], tokenizer: Tokenizer) -> ParsedReply:
        """See `ModelFamily.partial`."""
        stops = {tokenizer.added(token) for token in self.stop_tokens()}
        end = next((position for position, token in enumerate(ids) if token in stops), len(ids))
        reasoning, content = self.read_partial(self.marks.certain(ids[:end], tokenizer))
        return ParsedReply(content=content, reasoning=reasoning or None)

    def junction(self, sampled: Sequence[int], tokenizer: Tokenizer) -> tuple[int, list[int]]:
        """Adds what stands behind a stop token, and the stop token where the turn ended some other way."""
        behind = tokenizer.encode(self.behind) if self.behind else []
        stops = [tokenizer.added(token) for token in self.stop_tokens()]
        ended = bool(len(sampled)) and sampled[-1] in stops
        return 0, behind if ended else [tokenizer.special(self.stops[0].name), *behind]

    def stop_tokens(self) -> tuple[str, ...]:
        """See `ModelFamily.stop_tokens`."""
        return tuple(token.name for token in self.stops)

    def ending(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[Segment]:
        """The stop token of message `index`, and what stands behind it."""
        stop = as_segments(self.stops[:1], role="assistant", message=index, sampled=True)
        return [*stop, *as_segments([self.behind] if self.behind else [], role="assistant", message=index)]

    def block(self, messages: Sequence[Mapping[str, Any]], index: int, pieces: Sequence[Piece]) -> list[Segment]:
        """A message that the assistant did not write."""
        return as_segments(pieces, role=_role(messages, index), message=index)

    def _body(self, messages: Sequence[Mapping[str, Any]], start: int, add_generation_prompt: bool) -> list[Segment]:
        out: list[Segment] = []
        waiting: list[int] = []

        def close() -> None:
            for index, pieces in zip(waiting, self.run(messages, waiting) if waiting else [], strict=True):
                out.extend(self.block(messages, index, pieces))
            waiting.clear()

        for index in range(start, len(messages)):
            role = _role(messages, index)
            if self.joins(role):
                waiting.append(index)
                continue
            close()
            if role == "assistant":
                out += as_segments(self.opening(messages, index), role=role, message=index)
                out += as_segments(self.reply(messages, index), role=role, message=index, sampled=True)
                out += self.ending(messages, index)
            else:
                out += self.block(messages, index, self.said(role, content_text(messages[index], index), index))
        if add_generation_prompt:
            close()
            out += as_segments(self.opening(messages, len(messages)), role="assistant", message=len(messages))
        return out


def leading_system(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of a first message of the system, None when there is none."""
    is_system = bool(messages) and _role(messages, 0) == "system"
    return content_text(messages[0], 0) if is_system else None


def _role(messages: Sequence[Mapping[str, Any]], index: int) -> str:
    role = messages[index].get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"message {index}: role {role!r}; allowed: {', '.join(_ROLES)}")
    return _ROLES[role]
