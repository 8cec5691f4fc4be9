"""How many episodes run and how many groups are open, from measured rates.

Two uses of Little's law (1961: mean number in a system = throughput × mean time in it), per batch of B groups of G
episodes, while a train step takes T seconds:

1. **Concurrency.** The trainer is never idle when B·G/T trained episodes end a second. Episodes that live L seconds, of
   which one in r trains, need N = r·B·G·L/T running at once; `HEADROOM` on top, for the spread of L.
2. **Capacity.** Open groups / B is the mean time of a group from its first token to its batch, in steps: its staleness.
   So the bound on open groups (in batches) is the target, plus a trim that integrates what the target was missed by,
   since tokens of one group are of several ages and groups are taken a batch at a time.

Rates are smoothed by an exponential mean; both numbers stay between a batch (a group) and the bounds that the config
gives. A target below the time that a group lives, in train steps, cannot be had without idling: then the target wins.
Where the engines are too slow for the trainer the concurrency of (1) runs into its bound.
"""

from __future__ import annotations

import dataclasses
import math

__all__ = ["AdaptiveController", "Measured", "Settings"]

HEADROOM = 1.25
"""Running episodes over what Little's law asks for on average."""

SMOOTHING = 0.3
"""Weight of the newest measurement in the exponential mean."""

GAIN = 0.25
"""Share of a miss of the target that moves the trim, divided by the steps after which a batch tells of it (the target
and its own): an integral over a delay of d steps swings when its gain is near π / 2d."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One step as it was: seconds that the trainer was busy, mean seconds of an episode, episodes that ended for each
    that trained, mean staleness of the batch's groups."""

    train_seconds: float
    episode_seconds: float
    ended_per_trained: float
    staleness: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`max_running` episodes; `capacity` in batches of open groups, not a whole number."""

    max_running: int
    capacity: float


class AdaptiveController:
    """The law above. Pure: the same measurements give the same settings."""

    def __init__(
        self, *, batch_groups: int, group_size: int, target_staleness: float, max_running: int, capacity: int
    ) -> None:
        """`max_running` and `capacity` are the start and the upper bounds."""
        self._batch = batch_groups * group_size
        self._group_size = group_size
        self._target = target_staleness
        self._most = Settings(max_running=max_running, capacity=float(capacity))
        self._mean: Measured | None = None
        self._trim = 0.0

    @property
    def start(self) -> Settings:
        """What holds before anything was measured."""
        return dataclasses.replace(self._most, capacity=self._bounded(self._target + 1))

    def update(self, measured: Measured) -> Settings:
        """The settings for the next step."""
        mean = self._mean = measured if self._mean is None else _mixed(self._mean, measured)
        self._trim += GAIN / (1 + self._target) * (self._target - measured.staleness)
        self._trim = min(max(self._trim, -self._target), self._most.capacity)
        needed = math.inf
        if mean.train_seconds > 0:
            needed = (
                HEADROOM * max(mean.ended_per_trained, 1.0) * self._batch * mean.episode_seconds / mean.train_seconds
            )
        return Settings(
            max_running=max(self._group_size, math.ceil(min(needed, self._most.max_running))),
            capacity=self._bounded(self._target + 1 + self._trim),
        )

    def _bounded(self, capacity: float) -> float:
        return min(max(capacity, 1.0), self._most.capacity)


def _mixed(old: Measured, new: Measured) -> Measured:
    return Measured(
        **{
            field.name: (1 - SMOOTHING) * getattr(old, field.name) + SMOOTHING * getattr(new, field.name)
            for field in dataclasses.fields(Measured)
        }
    )
