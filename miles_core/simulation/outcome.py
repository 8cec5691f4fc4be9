"""What a simulation came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from miles_core.rollout.ledger import Conservation

__all__ = ["Outcome"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Numbers of the steps behind the warm-up, unless it says otherwise. Times in simulated seconds, idle times as
    shares of `seconds`, staleness in versions.

    The bound is the work-conserving one: nothing that trained these groups can have taken less than the trainer's own
    time, nor less than the engines need for these groups' tokens with every slot taken (and to stand still for every
    publish). `bound_seconds` is the larger; what `trainer_idle` and `engine_unused` would be in it is unavoidable.
    """

    steps: int
    seconds: float
    episodes: int
    """Episodes that trained."""
    tokens_trained: int
    tokens_sampled: float

    trainer_idle: float
    """Share of the time in which the trainer waited for a batch."""
    engine_idle: float
    """Share of the engines' time without a request (publishing apart)."""
    engine_unused: float
    """Share of the engines' time that their work for what trained did not need."""
    generating: float
    """Requests in slots, on average."""
    running: float
    """Episodes that ran, on average: they generate, queue or wait for a tool."""

    staleness_mean: float
    """Of the trained groups: a group is as old as its oldest token that trains."""
    staleness_p95: int
    staleness_max: int
    token_staleness: float
    """Mean over trained tokens."""

    dropped: Mapping[str, int]
    """Groups, by reason."""
    returned: Mapping[str, int]
    """Groups that were tried again, by `failed`, `retry`, `resample` or `surplus`."""
    wasted: float
    """Share of the tokens sampled and settled that did not train: dropped, sampled again, or masked for their age."""

    bound_seconds: float
    trainer_idle_bound: float
    engine_unused_bound: float

    tokens: Mapping[str, int]
    """Of the whole simulation: `trained`, `masked`, `dropped`, `again` (thrown away and sampled anew) and `open`."""
    sampled: float
    """Of the whole simulation, by the engines' own count."""
    cut: int
    """Requests that were interrupted: each may have cost a fraction of a token that is in `sampled` alone."""
    groups: Conservation
    """Of the whole simulation, by the ledger."""

    @property
    def steps_per_hour(self) -> float:
        return self.steps / self.seconds * 3600

    @property
    def episodes_per_second(self) -> float:
        return self.episodes / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens."""
        return self.tokens_trained / self.seconds

    def as_dict(self) -> dict[str, object]:
        """Plain JSON data."""
        rates = {name: getattr(self, name) for name in ("steps_per_hour", "episodes_per_second", "tokens_per_second")}
        return {**dataclasses.asdict(self), **rates}
