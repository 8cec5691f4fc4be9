"""What a scheduler is told once: the numbers of `[schedule]`; and what it hands out: episodes to start."""

from __future__ import annotations

import dataclasses
from typing import Literal

from miles_core.data.group import Prompt

__all__ = ["EpisodeStart", "SchedulePolicy", "StaleAnswer"]

StaleAnswer = Literal["drop", "retry", "reweight", "resample"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """The numbers that `[schedule]` gives; see `ScheduleSection` for what each means."""

    mode: Literal["sync", "async"]
    batch_groups: int
    group_size: int
    retries: int
    max_drops: int
    over_sample: int = 0
    partial: bool = False
    max_running: int = 0
    slot: Literal["episode", "group"] = "episode"
    capacity: int = 2
    max_staleness: int = 2
    stale: StaleAnswer = "drop"
    stale_decay: float = 0.0
    order: Literal["fifo", "freshest", "oldest_issue"] = "fifo"
    adaptive: bool = False
    target_staleness: float = 1.0

    @property
    def waves(self) -> bool:
        """A synchronous step without over-sampling: it depends on no timing, so neither may what replaces a group."""
        return self.mode == "sync" and self.over_sample == 0

    @property
    def ages(self) -> bool:
        """Groups may be older than the batch that takes them."""
        return self.mode == "async" or self.partial


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStart:
    """An episode that may start now. `priority` is its place in submission order."""

    group_id: str
    episode_id: str
    prompt: Prompt
    seed: int
    priority: int
