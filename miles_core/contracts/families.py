"""Model families: render messages to token ids, parse replies. Plain code over typed segments, no Jinja."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from miles_core.contracts.component import Component, ConfigT

__all__ = ["Evidence", "ModelFamily", "ParsedReply", "Segment", "Tokenizer"]

Evidence = Literal["verified", "template-equal", "unverified"]


class Tokenizer(Protocol):
    """The little that a family needs of a tokenizer. `encode` never turns text into special tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; text that spells a special token is tokenised as text."""
        ...

    def special(self, token: str) -> int:
        """Id of an added token. Raises `ModelError` when the vocabulary has none of that name."""
        ...

    def added(self, token: str) -> int | None:
        """Id of an added token, None when the vocabulary has none of that name."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int | None: ...


class Segment(NamedTuple):
    """A piece of a rendering: `special` is a special token by name, otherwise plain text.

    `optional` special tokens are text to a vocabulary that lacks them: `<tool_call>` is one token of Qwen2.5 and
    spelled by SmolLM2. `role` and `message` (index; a generation prompt has the index behind the last message) say
    where it came from; `sampled` is true on what an assistant wrote, which is what supervised fine-tuning trains on.
    """

    text: str
    special: bool = False
    role: str = ""
    message: int = -1
    sampled: bool = False
    optional: bool = False

    def behind(self, messages: int) -> Segment:
        """The same segment of a conversation that has so many more messages in front."""
        return Segment(self.text, self.special, self.role, self.message + messages, self.sampled, self.optional)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """An assistant message read from sampled ids. A malformed tool call stays in `content`, never lost."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    malformed: tuple[str, ...] = ()

    def as_message(self) -> dict[str, Any]:
        """The reply in the Chat Completions shape."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        return message


class ModelFamily(Component[ConfigT], abc.ABC):
    """Renders conversations to segments and parses replies of one family of models.

    The laws: rendering is append-only at every cut (the ids of a conversation are a prefix of the ids of its
    extension, junction included); `parse(render(reply)) == reply`; equal to the official chat template on every
    conversation where that template is itself append-only.
    """

    evidence: Evidence = "unverified"

    @abc.abstractmethod
    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> list[Segment]:
        """The whole conversation as segments. Raises `ValueError` for a role or content it cannot render."""

    @abc.abstractmethod
    def parse(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ParsedReply:
        """The assistant message that the sampled `ids` spell (stop token included or not).

        `tools` are those that the prompt offered. Formats that write a text and a number alike (XML calls) need their
        schemas to tell which is meant; without them such an argument is text.
        """

    @abc.abstractmethod
    def junction(self, sampled: Sequence[int], tokenizer: Tokenizer) -> tuple[int, list[int]]:
        """How sampled ids join the next message: (how many trailing sampled ids to drop, ids to add unsampled)."""

    @abc.abstractmethod
    def stop_tokens(self) -> tuple[str, ...]:
        """Special tokens that end an assistant turn."""

    def suffix(
        self, messages: Sequence[Mapping[str, Any]], *, after: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """What the messages behind the assistant's message `after` add, generation prompt included; the junction stands
        in front of it. Override it where nothing that came before changes how a message is rendered: then a turn costs
        what it adds. Default: the whole conversation is rendered."""
        segments = self.segments(messages, tools=tools, add_generation_prompt=True)
        return [segment for segment in segments if segment.message > after]

    def partial(self, ids: Sequence[int], tokenizer: Tokenizer) -> ParsedReply:
        """What is certain of a reply of which `ids` are sampled so far: reasoning and content that every continuation
        starts with, no tool calls. Default: nothing, so a stream brings the reply when it is complete."""
        return ParsedReply(content="")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids of the whole conversation. Text segments between special tokens are tokenised together."""
        from miles_core.data.segments import encode_segments

        return encode_segments(
            self.segments(messages, tools=tools, add_generation_prompt=add_generation_prompt), tokenizer
        )[0]
