"""Group filters that ship with the core."""

from __future__ import annotations

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.filters import GroupFilter
from miles_core.data.group import Group
from miles_core.data.trajectory import Status

__all__ = ["NoAborted", "NoAbortedConfig", "NonzeroStd", "NonzeroStdConfig"]


class NonzeroStdConfig(ComponentConfig):
    """Section `[filters.nonzero_std]`."""

    tolerance: float = 1e-6
    """Rewards are equal when max − min is at most this share of the largest magnitude: float32 noise is no signal."""


class NonzeroStd(GroupFilter[NonzeroStdConfig]):
    """Drops a group whose rewards are all equal: its advantages are zero, or noise divided by noise.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2), for any reward and not just 0 and 1.
    """

    Config = NonzeroStdConfig

    def drop_reason(self, group: Group, rewards: list[float]) -> str | None:
        """`zero_std` for equal rewards; a group of one episode has nothing to compare and is dropped too."""
        if not rewards:
            return "zero_std"
        spread = max(rewards) - min(rewards)
        magnitude = max(abs(reward) for reward in rewards)
        return None if spread > self.config.tolerance * magnitude else "zero_std"


class NoAbortedConfig(ComponentConfig):
    """Section `[filters.no_aborted]`; it has no keys."""


class NoAborted(GroupFilter[NoAbortedConfig]):
    """Drops a group in which an episode was aborted or failed."""

    Config = NoAbortedConfig

    def drop_reason(self, group: Group, rewards: list[float]) -> str | None:
        """`aborted` or `failed`, by the first such episode."""
        for episode in group.episodes:
            if episode.status in (Status.ABORTED, Status.FAILED):
                return episode.status.value
        return None
