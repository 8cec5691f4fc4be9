"""Faults of group filters."""

from __future__ import annotations

from miles_core.rollout.filters import NoAborted, NonzeroStd
from planted_faults import scaffolded

Good = scaffolded("group_filters")
GOOD = (Good, NonzeroStd, NoAborted)


class Divides(Good):
    """Takes the mean of nothing."""

    def drop_reason(self, group, rewards):
        return "low" if sum(rewards) / len(rewards) < 0 else None


class Boolean(Good):
    """True for text."""

    def drop_reason(self, group, rewards):
        return not rewards or None


class EmptyReason(Good):
    """Drops for no reason."""

    def drop_reason(self, group, rewards):
        return ""


class Essay(Good):
    """Explains at length."""

    def drop_reason(self, group, rewards):
        return (
            f"group {group.group_id} was dropped since it teaches nothing: all of its {len(rewards)} rewards are equal"
        )


class Remembers(Good):
    """Drops what it has seen."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = set()

    def drop_reason(self, group, rewards):
        key = tuple(rewards)
        known = key in self.seen
        self.seen.add(key)
        return "seen" if known else None


class Sorts(Good):
    """Puts the rewards in order."""

    def drop_reason(self, group, rewards):
        rewards.sort()
        return None


FAULTS = {
    "it_is_total": (Divides, Boolean),
    "a_reason_is_short_and_not_empty": (EmptyReason, Essay),
    "it_is_pure": (Remembers,),
    "it_leaves_the_rewards_alone": (Sorts,),
}
