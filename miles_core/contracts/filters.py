"""Group filters: keep or drop a finished group before it reaches the buffer."""

from __future__ import annotations

import abc

from miles_core.contracts.component import Component, ConfigT
from miles_core.data.group import Group

__all__ = ["GroupFilter"]


class GroupFilter(Component[ConfigT], abc.ABC):
    """A pure function of one finished, scored group. Filters run in config order; the first refusal wins."""

    @abc.abstractmethod
    def drop_reason(self, group: Group, rewards: list[float]) -> str | None:
        """None to keep the group; otherwise a short reason (`zero_std`), counted in the ledger and the report.

        `rewards` holds one finite scalar an episode, in episode order.
        """
