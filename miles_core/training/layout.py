"""One micro-batch as a flat sequence of rows: what the network reads, and where each token's prediction stands.

Trajectories that begin alike share the rows of what they have in common: a group its prompt, a whole micro-batch its
few-shot examples, equal answers everything. The rows form a prefix tree (radix tree); each node is a *segment* of
rows that attends to the path above it and to itself. A row's value depends on nothing but the ids before it, so
sharing changes no result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from miles_core.training.packing import common_prefix, sort_key

__all__ = ["Layout", "Segment", "Span", "lay_out", "prefix_tree"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A node of the prefix tree: `ids` at depth `depth`, below segment `parent` (−1 for a root).

    `owner` is the smallest index of a trajectory that passes through it.
    """

    parent: int
    depth: int
    ids: NDArray[np.int32]
    owner: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive segments of one shape, `length` rows each, the first of them at row `start`.

    `prefix_rows` int64 [count, prefix] are the rows of each segment's path from the root.
    """

    start: int
    length: int
    prefix_rows: NDArray[np.int64]

    @property
    def count(self) -> int:
        return int(self.prefix_rows.shape[0])

    @property
    def prefix(self) -> int:
        return int(self.prefix_rows.shape[1])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A micro-batch of L rows and the n tokens of its trajectories.

    | field | dtype, shape | |
    |---|---|---|
    | `input_ids`, `position_ids` | int64 [L] | positions restart with each trajectory |
    | `spans` | | together they cover the rows, in order |
    | `trajectories` | int64 [s] | index of each trajectory in the batch, in token order |
    | `offsets` | int64 [s+1] | tokens of trajectory i are `offsets[i]` to `offsets[i+1]` |
    | `token_index` | int64 [m] | which of the n tokens are wanted |
    | `row_of` | int64 [m] | row that predicts each wanted token |
    | `targets` | int64 [m] | its id |
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    spans: tuple[Span, ...]
    trajectories: NDArray[np.int64]
    offsets: NDArray[np.int64]
    token_index: NDArray[np.int64]
    row_of: NDArray[np.int64]
    targets: NDArray[np.int64]


def lay_out(
    members: Sequence[int],
    tokens: Sequence[NDArray[np.int32]],
    rows: Sequence[int],
    wanted: Sequence[NDArray[np.bool_]],
    *,
    share: bool = True,
) -> Layout:
    """Rows sorted by segment shape, so that attention runs once a shape, on contiguous rows.

    `members` are indices into `tokens`, `rows` and `wanted`, which belong to the whole batch.
    """
    inputs = {i: tokens[i][: rows[i]] for i in sorted(members)}
    if share:
        segments, end_of = prefix_tree(inputs)
    else:
        segments = [Segment(parent=-1, depth=0, ids=ids, owner=i) for i, ids in inputs.items()]
        end_of = {i: k for k, i in enumerate(inputs)}
    order, paths, spans = _place(segments)

    offsets = np.cumsum([0, *(len(tokens[i]) for i in inputs)], dtype=np.int64)
    hits = [np.flatnonzero(wanted[i][1:]) + 1 for i in inputs]
    return Layout(
        input_ids=_joined([segments[k].ids for k in order]),
        position_ids=_joined([np.arange(len(segments[k].ids)) + segments[k].depth for k in order]),
        spans=spans,
        trajectories=np.array(list(inputs), dtype=np.int64),
        offsets=offsets,
        token_index=_joined([h + start for h, start in zip(hits, offsets[:-1], strict=True)]),
        row_of=_joined([paths[end_of[i]][h - 1] for i, h in zip(inputs, hits, strict=True)]),
        targets=_joined([tokens[i][h] for i, h in zip(inputs, hits, strict=True)]),
    )


def prefix_tree(inputs: Mapping[int, NDArray[np.int32]]) -> tuple[list[Segment], dict[int, int]]:
    """The radix tree of the sequences (none of them empty), parents before children; and each one's last segment."""
    ordered = sorted(inputs, key=lambda i: sort_key(inputs[i]))
    shared = [0, *(common_prefix(inputs[a], inputs[b]) for a, b in pairwise(ordered))]
    segments: list[Segment] = []
    end_of: dict[int, int] = {}
    # Sequences low to high share their first `depth` ids, which `parent` and those above it hold.
    pending = [(0, len(ordered), 0, -1)] if ordered else []
    while pending:
        low, high, depth, parent = pending.pop()
        first = inputs[ordered[low]]
        common = min([len(first), *shared[low + 1 : high]])
        if common > depth:
            owner = min(ordered[low:high])
            segments.append(Segment(parent=parent, depth=depth, ids=first[depth:common], owner=owner))
            parent = len(segments) - 1
        while low < high and len(inputs[ordered[low]]) == common:
            end_of[ordered[low]] = parent
            low += 1
        edges = [low, *(k for k in range(low + 1, high) if shared[k] == common), high]
        pending += [(a, b, common, parent) for a, b in pairwise(edges) if a < b]
    return segments, end_of


def _place(segments: Sequence[Segment]) -> tuple[list[int], list[NDArray[np.int64]], tuple[Span, ...]]:
    """(order of the segments in the layout, rows of each segment's path with its own, spans).

    Segments of one shape stand in the order of their owners, so that an id changed in one trajectory does not move
    the rows of the others.
    """
    order = sorted(range(len(segments)), key=lambda k: (*_shape(segments[k]), segments[k].owner))
    start_of: dict[int, int] = {}
    at = 0
    for k in order:
        start_of[k] = at
        at += len(segments[k].ids)
    paths: list[NDArray[np.int64]] = []
    empty = np.empty(0, dtype=np.int64)
    for k, segment in enumerate(segments):
        above = paths[segment.parent] if segment.parent >= 0 else empty
        paths.append(np.concatenate([above, np.arange(start_of[k], start_of[k] + len(segment.ids))]))
    spans = [
        Span(
            start=start_of[same[0]],
            length=shape[1],
            prefix_rows=np.stack([paths[k][: shape[0]] for k in same]),
        )
        for shape, same in ((shape, list(g)) for shape, g in groupby(order, key=lambda k: _shape(segments[k])))
    ]
    return order, paths, tuple(spans)


def _shape(segment: Segment) -> tuple[int, int]:
    return segment.depth, len(segment.ids)


def _joined(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
