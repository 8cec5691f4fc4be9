"""From a request to the ids that a turn adds: only what is new is tokenised, behind the family's junction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.families import ModelFamily, Tokenizer
from miles_core.data.segments import encode_segments
from miles_core.tito.tree import Node

__all__ = ["Suffix", "turn_suffix"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Suffix:
    """`drop` of the parent's last ids go, `ids` int32 [n] come, none of them sampled."""

    drop: int
    ids: NDArray[np.int32]


def turn_suffix(
    family: ModelFamily[Any],
    tokenizer: Tokenizer,
    parent: Node,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> Suffix:
    """What `messages` (the whole request) add behind `parent`, up to where the reply is sampled.

    A dropped id that the suffix puts back at once was sampled and stays so: nothing sampled is lost to a junction that
    only moves a border. Raises `ValueError` for messages that the family cannot render.
    """
    if parent.added is None:
        segments = family.segments(messages, tools=tools, add_generation_prompt=True)
        return Suffix(drop=0, ids=_array(encode_segments(segments, tokenizer)[0]))
    sampled = parent.added.ids[parent.added.sampled :].tolist()
    drop, add = family.junction(sampled, tokenizer)
    segments = family.suffix(messages, after=parent.depth - 1, tools=tools)
    new = [*add, *encode_segments(segments, tokenizer)[0]]
    if drop and new[:drop] == sampled[-drop:]:
        drop, new = 0, new[drop:]
    return Suffix(drop=drop, ids=_array(new))


def _array(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.fromiter(ids, np.int32, len(ids))
