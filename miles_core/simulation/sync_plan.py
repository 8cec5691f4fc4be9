"""Which GPU of a pipeline stage feeds which rank of which engine, one-sided: one to one first, then the least loaded.

Every GPU of a stage can be given any shard of it, because the whole stage is gathered past it; it prepares its shards
one after the other in one registered buffer. A target whose shard somebody prepares already goes there.
"""

from __future__ import annotations

import dataclasses
import functools

__all__ = ["Source", "assign_sources", "busiest"]


@dataclasses.dataclass(slots=True)
class Source:
    """What one GPU of a stage does."""

    shards: set[int] = dataclasses.field(default_factory=set)
    """The ranks of an engine whose part it prepares."""
    targets: int = 0
    """Ranks, of all engines, that it writes to."""


def assign_sources(sources: int, engines: int, ranks: int) -> list[Source]:
    """Share `engines` × `ranks` targets out to `sources`. The least loaded has the fewest targets: the shards of one
    stage are equally large."""
    plan = [Source() for _ in range(sources)]
    holders: list[list[Source]] = [[] for _ in range(ranks)]
    for number in range(engines * ranks):
        rank = number % ranks
        chosen = plan[number] if number < sources else min(holders[rank] or plan, key=lambda source: source.targets)
        if rank not in chosen.shards:
            chosen.shards.add(rank)
            holders[rank].append(chosen)
        chosen.targets += 1
    return plan


@functools.cache
def busiest(sources: int, engines: int, ranks: int) -> tuple[int, int]:
    """The most shards that one GPU prepares, and the most targets that one writes to."""
    plan = assign_sources(sources, engines, ranks)
    return max(len(source.shards) for source in plan), max(source.targets for source in plan)
