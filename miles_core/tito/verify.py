"""Proving what a family renders, on generated conversations: the laws of `ModelFamily`, one conversation at a time."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_core.contracts.families import ModelFamily, Segment, Tokenizer
from miles_core.data.segments import encode_segments
from miles_core.tito.generated import BROKEN, TOOLS, conversations
from miles_core.tito.official import OfficialTemplate

__all__ = ["TOOLS", "Finding", "Verdict", "check_reply", "conversations", "takes", "verify"]

Messages = list[dict[str, Any]]
Broken = Iterator[tuple[str, str]]
"""(law, what breaks it)"""

_QUESTION: Messages = [{"role": "user", "content": "q"}]
_REMEMBERED = 1 << 16  # texts
_STREAMED = 3  # places in a reply where a stream is looked at


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One law that one conversation breaks."""

    law: str
    detail: str
    messages: Messages


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was tried: how many conversations, how many the family refused, how often each law was broken, and the first
    finding of each. Of the replies that were read: their number, their tool calls, and their malformed calls.
    `compared`: conversations held to the official template."""

    conversations: int
    refused: int
    broken: Mapping[str, int]
    findings: tuple[Finding, ...]
    replies: int = 0
    calls: int = 0
    malformed: int = 0
    compared: int = 0


def verify(
    family: ModelFamily[Any],
    tokenizer: Tokenizer,
    *,
    count: int,
    seed: int = 0,
    special: Sequence[str] = (),
    official: OfficialTemplate | None = None,
    compare: int = 1000,
    noise: bool = True,
) -> Verdict:
    """Try the laws on `count` generated conversations. Those that the family refuses are counted apart.

    `official` adds the law that the family's text is the template's, on `compare` further, gentle conversations where
    it can be held to it. `noise` reads replies that are broken off and mixed up, too.
    """
    broken: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    first: dict[str, Finding] = {}
    remembering = _Remembering(tokenizer)
    pick = random.Random(seed) if noise else None
    traits = {
        "reasoning": takes(family, {"role": "assistant", "content": "b", "reasoning_content": "c"}),
        "developer": takes(family, {"role": "developer", "content": "b"}),
    }

    def note(law: str, detail: str, messages: Messages) -> None:
        broken[law] += 1
        first.setdefault(law, Finding(law=law, detail=detail, messages=messages))

    for messages, offered in conversations(count, seed=seed, special=special, **traits):
        tools = TOOLS if offered else ()
        try:
            whole = family.render(messages, remembering, tools=tools, add_generation_prompt=True)
        except ValueError as error:
            seen["refused"] += 1
            first.setdefault("refused", Finding(law="refused", detail=str(error), messages=messages))
            continue
        for law, detail in _check(family, remembering, messages, tools, whole, pick, seen):
            note(law, detail, messages)
    if official is not None:
        for messages, offered in conversations(compare, seed=seed, special=special, gentle=True, **traits):
            for law, detail in _check_text(family, official, messages, TOOLS if offered else (), seen):
                note(law, detail, messages)
    return Verdict(
        conversations=count,
        refused=seen["refused"],
        broken=dict(broken),
        findings=tuple(first.values()),
        replies=seen["replies"],
        calls=seen["calls"],
        malformed=seen["malformed"],
        compared=seen["compared"],
    )


def takes(family: ModelFamily[Any], message: Mapping[str, Any]) -> bool:
    """Whether a family renders such a message behind a user's."""
    try:
        family.segments([{"role": "user", "content": "a"}, message])
    except ValueError:
        return False
    return True


class _Remembering:
    """A tokenizer that encodes each text once: cut after cut, a conversation brings the same ones again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encoded: dict[str, list[int]] = {}
        self._tokenizer = tokenizer
        self.special = tokenizer.special
        self.added = tokenizer.added
        self.decode = tokenizer.decode

    def encode(self, text: str) -> list[int]:
        ids = self._encoded.get(text)
        if ids is None:
            if len(self._encoded) == _REMEMBERED:
                self._encoded.clear()
            ids = self._encoded[text] = self._tokenizer.encode(text)
        return ids

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def eos_id(self) -> int | None:
        return self._tokenizer.eos_id


def _check(
    family: ModelFamily[Any],
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]],
    whole: Sequence[int],
    pick: random.Random | None,
    seen: Counter[str],
) -> Broken:
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    noisy_at = pick.choice(replies) if pick is not None else -1
    for at in replies:
        message = messages[at]
        prompt = family.render(messages[:at], tokenizer, tools=tools, add_generation_prompt=True)
        if whole[: len(prompt)] != prompt:
            yield "append-only", f"the prompt for message {at} is no prefix of the whole conversation"
        own = _own(family, messages[:at], message, tools)
        sampled = encode_segments(own, tokenizer)[0]
        yield from check_reply(family, tokenizer, messages[:at], sampled, tools, seen, known=message)
        if pick is not None and at == noisy_at:
            noisy = encode_segments(_noisy(own, pick, family.stop_tokens()), tokenizer)[0]
            yield from check_reply(family, tokenizer, _QUESTION, noisy, tools, seen)
        if at + 1 < len(messages):
            drop, add = family.junction(sampled, tokenizer)
            rest = encode_segments(family.suffix(messages, after=at, tools=tools), tokenizer)[0]
            if [*prompt, *sampled[: len(sampled) - drop], *add, *rest] != whole:
                yield "junction", f"prompt, message {at}, junction and suffix do not make the whole conversation"


def check_reply(
    family: ModelFamily[Any],
    tokenizer: Tokenizer,
    before: Messages,
    sampled: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
    seen: Counter[str],
    *,
    known: Mapping[str, Any] | None = None,
) -> Broken:
    """The laws of one reply of the ids `sampled` behind the messages `before`: read, rendered and read again it is the
    same message, and what a stream showed of it stands. Counts what was read in `seen`. `known` is the message that
    was rendered to make `sampled`, if it was."""
    parsed = family.parse(sampled, tokenizer, tools=tools)
    message = parsed.as_message()
    seen.update(replies=1, calls=len(parsed.tool_calls), malformed=len(parsed.malformed))
    at = len(before)
    if message != known:  # otherwise it was just rendered and parsed
        try:
            ids = encode_segments(_own(family, before, message, tools), tokenizer)[0]
        except ValueError as error:
            yield "parse inverts render", f"message {at} is parsed as {message}, which is refused: {error}"
            return
        again = family.parse(ids, tokenizer, tools=tools).as_message()
        if again != message:
            yield "parse inverts render", f"message {at} is rendered and parsed as {again}, it was {message}"
    for length in range(0, len(sampled), len(sampled) // _STREAMED + 1):
        partial = family.partial(sampled[:length], tokenizer)
        certain = (message["content"], message.get("reasoning_content") or "")
        if not (certain[0].startswith(partial.content) and certain[1].startswith(partial.reasoning or "")):
            yield "streaming", f"message {at}: {partial} was certain after {length} ids, the reply is {message}"
            break


def _own(
    family: ModelFamily[Any], before: Messages, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> list[Segment]:
    """What an assistant samples to say `message`."""
    segments = family.segments([*before, message], tools=tools)
    return [segment for segment in segments if segment.message == len(before) and segment.sampled]


def _noisy(own: Sequence[Segment], pick: random.Random, stops: Sequence[str]) -> list[Segment]:
    """A reply that went wrong: said twice or broken off, with a broken call in the middle."""
    body = [segment for segment in own if not (segment.special and segment.text in stops)]
    cut, end = pick.randrange(len(body) + 1), pick.randrange(len(body) + 1)
    return [*body[:end], Segment(pick.choice(BROKEN), sampled=True), *body[cut:]]


def _check_text(
    family: ModelFamily[Any],
    official: OfficialTemplate,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]],
    seen: Counter[str],
) -> Broken:
    theirs = official.whole(messages, tools)
    if theirs is None:
        return
    seen["compared"] += 1
    ours = "".join(s.text for s in family.segments(messages, tools=tools, add_generation_prompt=True))
    if ours != theirs:
        shorter = min(len(ours), len(theirs))
        at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
        there = slice(at, at + 60)
        yield "official template", f"at character {at}: {ours[there]!r}, the template says {theirs[there]!r}"
