"""The buffer: finished groups between the producer and the trainer, in the order in which they train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from miles_core.data.group import Episode, Group, Prompt

__all__ = ["Buffer", "Finished", "OpenGroup"]

Order = Literal["fifo", "freshest", "oldest_issue"]


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class OpenGroup:
    """One attempt at a group, from pending to finished. `ended` holds its episodes that ended, by index: a resampled
    group starts with those that are kept. `failures` and `stale` count why it was tried again."""

    position: int
    group_id: str
    attempt: int = 0
    failures: int = 0
    stale: int = 0
    prompt: Prompt | None = None
    ended: dict[int, Episode] = dataclasses.field(default_factory=dict)
    unstarted: int = 0

    def again(self, *, failures: int = 0, stale: int = 0, kept: dict[int, Episode] | None = None) -> OpenGroup:
        """The next attempt. Without `kept` every episode is generated anew."""
        return OpenGroup(
            position=self.position,
            group_id=self.group_id,
            attempt=self.attempt + 1,
            failures=self.failures + failures,
            stale=self.stale + stale,
            prompt=self.prompt,
            ended=dict(kept or {}),
        )

    def __lt__(self, other: OpenGroup) -> bool:
        return self.position < other.position


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finished:
    """A finished group in the buffer. `oldest` and `newest` are the versions of its tokens that train; a group without
    any is as young as can be."""

    group: Group
    open: OpenGroup
    oldest: int | None
    newest: int | None


_KEYS: dict[Order, Callable[[Finished], int]] = {
    "oldest_issue": lambda finished: finished.open.position,
    "freshest": lambda finished: -(finished.oldest or 0),
}
"""What the groups are sorted by when a batch is taken; `fifo` is the order in which they came."""


class Buffer:
    """Finished groups by arrival. Adding is O(1), a version or a batch costs O(buffer log buffer)."""

    def __init__(self, order: Order) -> None:
        self._key = _KEYS.get(order)
        self._groups: list[Finished] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, finished: Finished) -> None:
        self._groups.append(finished)

    def remove_if(self, over: Callable[[Finished], bool]) -> list[Finished]:
        """Take out every group that is `over`, and return them in arrival order."""
        removed = [f for f in self._groups if over(f)]
        if removed:
            self._groups = [f for f in self._groups if not over(f)]
        return removed

    def take(self, count: int) -> list[Finished]:
        """The first `count` groups by the buffer's order, in issue order."""
        if self._key is not None:
            self._groups.sort(key=self._key)
        taken, self._groups = self._groups[:count], self._groups[count:]
        return sorted(taken, key=lambda finished: finished.open.position)

    def clear(self) -> list[Finished]:
        """Empty the buffer."""
        removed, self._groups = self._groups, []
        return removed
