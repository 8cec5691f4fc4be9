"""From typed segments to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.contracts.families import Segment, Tokenizer

__all__ = ["encode_segments", "suffix_segments"]


def encode_segments(segments: Sequence[Segment], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of `segments`, and for each id whether the assistant wrote it.

    A special segment is one id (an optional one that the vocabulary lacks is text). Adjacent text segments with one
    `sampled` value are tokenised together; a change of `sampled` is a token boundary, as it is when a model samples
    behind a rendered prompt.
    """
    ids: list[int] = []
    sampled: list[bool] = []
    pending: list[str] = []
    pending_sampled = False

    def flush() -> None:
        if pending:
            new = tokenizer.encode("".join(pending))
            ids.extend(new)
            sampled.extend([pending_sampled] * len(new))
            pending.clear()

    for segment in segments:
        if segment.special and not (segment.optional and tokenizer.added(segment.text) is None):
            flush()
            ids.append(tokenizer.special(segment.text))
            sampled.append(segment.sampled)
        elif segment.text:
            if pending and pending_sampled != segment.sampled:
                flush()
            pending_sampled = segment.sampled
            pending.append(segment.text)
    flush()
    return ids, sampled


def suffix_segments(segments: Sequence[Segment], *, after: int) -> list[Segment]:
    """What a rendered conversation adds behind message `after` (an assistant message whose tokens are already held).

    The family's junction stands between the two: it makes what the official rendering puts after a sampled stop token.
    """
    return [segment for segment in segments if segment.message > after]
