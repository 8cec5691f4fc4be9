"""The pace of a schedule: what ran and what waited between two batches, by an injected clock."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.rollout.adaptive import Measured

__all__ = ["Pace"]


class Pace:
    """Counts running episodes, and integrates them over time.

    The mean life of an episode needs no clock of its own: by Little's law it is (episode-seconds that ran) / (episodes
    that ended).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.running = 0
        self._area = 0.0
        self._ended = 0
        self._changed = self._since = self._wanted_at = clock()
        self._first = True
        self._busy = 0.0
        self.metrics: dict[str, float] = {}
        """Of the last batch: `running_mean` episodes, `episode_seconds` (0 when none ended), `trainer_idle_seconds`
        between asking for the batch and having it, `trainer_busy_seconds` before that, `ended` episodes."""

    def run(self, count: int) -> None:
        """`count` episodes started."""
        if count:
            self._integrate()
            self.running += count

    def end(self) -> None:
        """An episode ended."""
        self._integrate()
        self.running -= 1
        self._ended += 1

    def stop(self) -> None:
        """Everything that runs is cancelled: it ran, and did not end."""
        self._integrate()
        self.running = 0

    def wanted(self) -> None:
        """The trainer is free, and wants a batch."""
        self._wanted_at = self._clock()
        self._busy = self._wanted_at - self._since

    def taken(self, *, episodes: int, staleness: float) -> Measured | None:
        """The trainer has its batch of `episodes`. Returns the step's measurements; None for the first batch, before
        which there was no train step, and where no episode ended."""
        self._integrate()
        now = self._changed
        seconds = self._area / self._ended if self._ended else 0.0
        span = now - self._since
        self.metrics = {
            "running_mean": self._area / span if span > 0 else float(self.running),
            "episode_seconds": seconds,
            "trainer_idle_seconds": now - self._wanted_at,
            "trainer_busy_seconds": 0.0 if self._first else self._busy,
            "ended": float(self._ended),
        }
        measured = None
        if not self._first and self._ended:
            measured = Measured(
                train_seconds=self._busy,
                episode_seconds=seconds,
                ended_per_trained=self._ended / episodes,
                staleness=staleness,
            )
        self._first = False
        self._area, self._ended, self._since = 0.0, 0, now
        return measured

    def _integrate(self) -> None:
        now = self._clock()
        self._area += self.running * (now - self._changed)
        self._changed = now
