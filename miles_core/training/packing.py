"""Which trajectories are computed together. Numpy only.

Two pure functions:

1. `clusters_of` cuts the batch into clusters: the trajectories of one group, whose common prompt is computed once.
2. `plan` packs clusters into micro-batches under a token budget (first-fit decreasing, Johnson 1973) and deals the
   micro-batches to ranks, longest processing time first (Graham 1969), by estimated work.

`miles_core.training.layout` then writes a micro-batch as a prefix tree.

A *row* is one position of the network's input. Token t of a trajectory is predicted by the row of token t − 1, so a
trajectory whose last token of interest is t needs t rows: what nobody reads is not computed.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cluster", "clusters_of", "common_prefix", "first_fit_decreasing", "plan", "rows_needed", "sort_key"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Trajectories computed together: their indices, their distinct rows, and the query-key pairs of attention."""

    members: tuple[int, ...]
    rows: int
    pairs: float

    def work(self, pair_cost: float) -> float:
        """Estimated work, in units of one row's matrix products; `pair_cost` is that of one query-key pair."""
        return self.rows + pair_cost * self.pairs


def rows_needed(wanted: NDArray[np.bool_]) -> int:
    """Rows that the log-probs of the `wanted` tokens need: the index of the last one (token 0 is never predicted)."""
    return max(wanted.tobytes().rfind(1), 0)


def sort_key(ids: NDArray[np.int32]) -> bytes:
    """Bytes that sort as the id sequence does, so that sequences with a common prefix stand together."""
    return ids.astype(">u4").tobytes()


def common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Number of leading ids that two sequences share."""
    return _common_ids(sort_key(first), sort_key(second))


def _common_ids(first: bytes, second: bytes) -> int:
    """`common_prefix` of two sort keys: as big-endian numbers they differ from their first different id on."""
    size = min(len(first), len(second))
    different = int.from_bytes(first[:size]) ^ int.from_bytes(second[:size])
    return (8 * size - different.bit_length()) // 32


def clusters_of(
    tokens: Sequence[NDArray[np.int32]],
    rows: Sequence[int],
    groups: Sequence[str],
    *,
    budget: int,
    share: bool = True,
) -> list[Cluster]:
    """Clusters of at most `budget` rows (a trajectory that alone needs more stays alone and whole).

    `tokens[i]` are the ids of trajectory i, of which the first `rows[i]` are computed; those with 0 rows appear in no
    cluster. With `share` a cluster is (a part of) a group, otherwise one trajectory.
    """
    by_group: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if rows[index] > 0:
            by_group.setdefault(group if share else str(index), []).append(index)
    return [cluster for members in by_group.values() for cluster in _split(members, tokens, rows, budget)]


def _sort_keys(members: Sequence[int], tokens: Sequence[NDArray[np.int32]], rows: Sequence[int]) -> dict[int, bytes]:
    """The `sort_key` of what is computed of each, by one conversion for all."""
    joined = sort_key(np.concatenate([tokens[i] for i in members]))
    keys, start = {}, 0
    for i in members:
        keys[i] = joined[start : start + 4 * rows[i]]
        start += 4 * len(tokens[i])
    return keys


def _split(
    members: Sequence[int], tokens: Sequence[NDArray[np.int32]], rows: Sequence[int], budget: int
) -> Iterator[Cluster]:
    """Fill clusters with neighbours in sorted order: each adds the rows that it does not share with the one before."""
    keys = _sort_keys(members, tokens, rows) if len(members) > 1 else {}
    ordered = sorted(members, key=keys.__getitem__) if keys else members
    taken: list[int] = []
    total, pairs = 0, 0.0
    for index in ordered:
        length = rows[index]
        shared = _common_ids(keys[taken[-1]], keys[index]) if taken else 0
        if taken and total + length - shared > budget:
            yield Cluster(members=tuple(taken), rows=total, pairs=pairs)
            taken, total, pairs, shared = [], 0, 0.0, 0
        taken.append(index)
        total += length - shared
        pairs += (length**2 - shared**2) / 2
    yield Cluster(members=tuple(taken), rows=total, pairs=pairs)


def plan(
    clusters: Sequence[Cluster], *, budget: int, ranks: int = 1, pair_cost: float = 0.0
) -> list[list[list[Cluster]]]:
    """Micro-batches of every rank: `plan(...)[rank][i]` is a list of clusters, of at most `budget` rows in all.

    Every rank gets the same number of micro-batches, some possibly empty, so that collectives line up.
    """
    bins = first_fit_decreasing([c.rows for c in clusters], budget)
    micro_batches = [[clusters[i] for i in members] for members in bins]
    work = [sum(c.work(pair_cost) for c in micro) for micro in micro_batches]
    each = -(-len(micro_batches) // ranks)
    dealt: list[list[list[Cluster]]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(micro_batches)), key=lambda i: (-work[i], i)):
        load, rank = heapq.heappop(heap)
        dealt[rank].append(micro_batches[index])
        if len(dealt[rank]) < each:
            heapq.heappush(heap, (load + work[index], rank))
    for own in dealt:
        own.extend([] for _ in range(each - len(own)))
    return dealt


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of item indices. Items in decreasing size (ties by index), each into the first bin that
    has room; an item above `capacity` has a bin of its own.

    Items of one size are placed together: the first bin with room takes as many as it holds, then the next one. So
    the work is one vector operation over the bins for every distinct size.
    """
    items = np.asarray(sizes, dtype=np.int64)
    order = np.argsort(-items, kind="stable")
    oversized = int(np.count_nonzero(items > capacity))
    bins = [[i] for i in order[:oversized].tolist()]
    order = order[oversized:]
    kinds, starts = np.unique(-items[order], return_index=True)
    room = np.full(len(order), capacity, dtype=np.int32)  # of every bin that there may be, most of them never opened
    bin_of = np.empty(len(order), dtype=np.int64)
    opened = 0
    for size, (start, stop) in zip((-kinds).tolist(), pairwise([*starts.tolist(), len(order)]), strict=True):
        left = stop - start
        fitting = np.flatnonzero(room[:opened] >= size)
        holds = room[fitting] // size
        used = min(int(np.searchsorted(holds.cumsum(), left)) + 1, len(fitting))
        taken = np.minimum(holds[:used], left)
        if used:
            taken[-1] = min(int(taken[-1]), left - int(taken[:-1].sum()))
        left -= int(taken.sum())
        each = capacity // size
        new = -(-left // each)
        chosen = np.concatenate([fitting[:used], np.arange(opened, opened + new)])
        counts = np.concatenate([taken, np.full(new, each)])
        if new:
            counts[-1] = left - (new - 1) * each
        room[chosen] -= counts * size
        bin_of[start:stop] = chosen.repeat(counts)
        opened += new
    by_bin = np.argsort(bin_of, kind="stable")
    edges = np.searchsorted(bin_of[by_bin], np.arange(1, opened))
    packed = order[by_bin].tolist()
    return bins + [packed[a:b] for a, b in pairwise([0, *edges.tolist(), len(packed)])] if opened else bins
