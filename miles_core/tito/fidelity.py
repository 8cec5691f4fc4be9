"""What a trajectory holds, against what its conversation says: the family renders the messages anew, and every
difference has a class.

Both token sequences are cut at their special tokens: those that the policy did not sample, and the one that ends a
turn. Between two of them stands text of others (roles, prompts, tool results), and what the assistant said, tags and
all. Text is compared as text: a policy may well sample other tokens than its text is encoded to, and keeps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import orjson

from miles_core.contracts.families import ModelFamily
from miles_core.data.segments import encode_segments
from miles_core.data.tokenizer import FileTokenizer
from miles_core.data.trajectory import NOT_SAMPLED, Status, Trajectory

__all__ = ["CLASSES", "HARD", "Mismatch", "compare"]

HARD = ("special-token count", "special-token type", "non-assistant text")
CLASSES = (*HARD, "assistant text")
"""The first three mean that the policy was trained on another conversation than it had. The last is soft: what a client
gets of a reply is read from its tokens, and reading may drop what it cannot represent (white space, a stop string)."""

_SHOWN = 60


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """One difference, of one of `CLASSES`."""

    kind: str
    detail: str


@dataclasses.dataclass(slots=True)
class _Section:
    """A special token (-1 at the beginning) and the text behind it, up to the next one."""

    special: int
    others: str = ""
    assistant: str = ""


def compare(trajectory: Trajectory, family: ModelFamily[Any], tokenizer: FileTokenizer) -> Iterator[Mismatch]:
    """The differences between a trajectory and its conversation, the first of each kind of place. Of a trajectory that
    was cut, the end of the conversation may be missing. Raises `ValueError` without a conversation."""
    if trajectory.conversation is None:
        raise ValueError(f"{trajectory.trajectory_id} has no conversation to compare with")
    said = orjson.loads(trajectory.conversation)
    stops = {tokenizer.special(token) for token in family.stop_tokens()}
    sampled = (trajectory.versions != NOT_SAMPLED).tolist()
    held = _sections(trajectory.token_ids.tolist(), sampled, stops, tokenizer)
    replies = set(said["replies"])
    segments = [
        s._replace(sampled=s.sampled and s.message in replies)
        for s in family.segments(said["messages"], tools=said["tools"])
    ]
    expected = _sections(*encode_segments(segments, tokenizer), stops, tokenizer)
    yield from _differences(held, expected, tokenizer, cut=trajectory.status is Status.TRUNCATED)


def _sections(ids: Sequence[int], sampled: Sequence[bool], stops: set[int], tokenizer: FileTokenizer) -> list[_Section]:
    """A sequence, cut at its special tokens. It ends with the last reply, without the token that ends that: a reply may
    have been cut, and what stands behind it was sent to nobody."""
    special = tokenizer.added_ids
    last = max((i for i, was in enumerate(sampled) if was), default=-1)
    if last >= 0 and ids[last] in stops:
        last -= 1
    end = last + 1 if last >= 0 else len(ids)
    sections = [_Section(-1)]
    run: list[int] = []

    def close(whose: bool) -> None:
        text = tokenizer.decode(run)
        run.clear()
        if whose:
            sections[-1].assistant += text
        else:
            sections[-1].others += text + "\0"  # where the assistant's text stands among it counts

    for index in range(end):
        own = sampled[index]
        ends = own and ids[index] in stops and not (index + 1 < len(ids) and sampled[index + 1])
        boundary = (not own and ids[index] in special) or ends
        if run and (boundary or own != sampled[index - 1]):
            close(sampled[index - 1])
        if boundary:
            sections.append(_Section(ids[index]))
        else:
            run.append(ids[index])
    if run:
        close(sampled[end - 1])
    return sections


def _differences(
    held: list[_Section], expected: list[_Section], tokenizer: FileTokenizer, *, cut: bool
) -> Iterator[Mismatch]:
    if len(held) > len(expected) or (len(held) < len(expected) and not cut):
        detail = f"{len(held) - 1} special tokens, its conversation has {len(expected) - 1}"
        yield Mismatch(kind="special-token count", detail=detail)
        return  # behind the one too many or too few, nothing stands at its place
    for place, (own, other) in enumerate(zip(held, expected, strict=False)):
        if own.special != other.special:
            found, wanted = (tokenizer.decode([s.special]) for s in (own, other))
            detail = f"special token {place} is {found!r}, in its conversation {wanted!r}"
            yield Mismatch(kind="special-token type", detail=detail)
        ends_here = cut and place == len(held) - 1
        for kind, mine, theirs in (
            ("non-assistant text", own.others, other.others),
            ("assistant text", own.assistant, other.assistant),
        ):
            if mine != theirs and not (ends_here and theirs.startswith(mine.removesuffix("\0"))):
                at = next(i for i, (a, b) in enumerate(zip_longest(mine, theirs)) if a != b)
                shown = (text[max(at - 10, 0) : at + _SHOWN] for text in (mine, theirs))
                detail = "behind special token {}: {!r}, in its conversation {!r}".format(place, *shown)
                yield Mismatch(kind=kind, detail=detail)
