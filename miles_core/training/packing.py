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
    hits = np.flatnonzero(wanted)
    return int(hits[-1]) if len(hits) else 0


def sort_key(ids: NDArray[np.int32]) -> bytes:
    """Bytes that sort as the id sequence does, so that sequences with a common prefix stand together."""
    return ids.astype(">u4").tobytes()


def common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Number of leading ids that two sequences share."""
    shortest = min(len(first), len(second))
    different = np.flatnonzero(first[:shortest] != second[:shortest])
    return int(different[0]) if len(different) else shortest


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


def _split(
    members: Sequence[int], tokens: Sequence[NDArray[np.int32]], rows: Sequence[int], budget: int
) -> Iterator[Cluster]:
    """Fill clusters with neighbours in sorted order: each adds the rows that it does not share with the one before."""
    inputs = {i: tokens[i][: rows[i]] for i in members}
    ordered = sorted(members, key=lambda i: sort_key(inputs[i])) if len(members) > 1 else list(members)
    taken: list[int] = []
    total, pairs = 0, 0.0
    for index in ordered:
        length = rows[index]
        shared = common_prefix(inputs[taken[-1]], inputs[index]) if taken else 0
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
    """Bins of item indices. Items in decreasing size (ties by index), each into the first bin that has room; an item
    above `capacity` has a bin of its own. O(n log n): a tournament tree over the bins' free room finds the first."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    oversized = [i for i in order if sizes[i] > capacity]
    rest = order[len(oversized) :]
    # First fit leaves at most one bin half empty, which bounds how many there can be.
    most = min(len(rest), 2 * sum(sizes[i] for i in rest) // max(capacity, 1) + 1)
    leaves = 1 << max(most - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)  # room[1] is the root; leaf b is room[leaves + b]
    bins: list[list[int]] = []
    at = 0
    while at < len(rest):
        size = sizes[rest[at]]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        # Equal items go to the same bin while it has room: no earlier bin could hold the first of them.
        free, first = room[node], at
        while at < len(rest) and sizes[rest[at]] == size and free >= size:
            free -= size
            at += 1
        bins[node - leaves] += rest[first:at]
        room[node] = free
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            best = left if left >= right else right
            if room[node] == best:
                break
            room[node] = best
    return [[i] for i in oversized] + bins
