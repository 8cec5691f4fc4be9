"""Which source writes which shard to which target.

One to one first: a target takes its shards from the source that nobody else has been given, as far as there are such;
what is left goes to the least-loaded source (bytes assigned so far) that holds the shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

__all__ = ["Assignment", "assign"]


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """`source` writes `shard` to `target`."""

    source: str
    target: str
    shard: str


def assign(
    sizes: Mapping[str, int], holders: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]]
) -> list[Assignment]:
    """A source for every shard of every target, in the order of `wanted`.

    `sizes`: bytes by shard. `holders`: shards by source. `wanted`: shards by target. Raises `ValueError` naming a
    shard that no source holds.
    """
    held = {source: set(shards) for source, shards in holders.items()}
    load = dict.fromkeys(held, 0)
    partner: dict[str, str] = {}
    free = list(held)
    for target, shards in wanted.items():
        found = max(free, key=lambda s: sum(sizes[x] for x in shards if x in held[s]), default=None)
        if found is not None and held[found] & set(shards):
            partner[target] = found
            free.remove(found)
    assignments = []
    for own in (True, False):
        for target, shards in wanted.items():
            for shard in shards:
                with_partner = target in partner and shard in held[partner[target]]
                if with_partner is not own:
                    continue
                candidates = [partner[target]] if own else [s for s in held if shard in held[s]]
                if not candidates:
                    raise ValueError(f"{target} needs {shard}, which no source holds")
                source = min(candidates, key=lambda s: load[s])
                load[source] += sizes[shard]
                assignments.append(Assignment(source, target, shard))
    place = {(t, s): (i, j) for i, (t, shards) in enumerate(wanted.items()) for j, s in enumerate(shards)}
    return sorted(assignments, key=lambda a: place[a.target, a.shard])
