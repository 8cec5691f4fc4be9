"""Faults of rewards."""

from __future__ import annotations

import math

from miles_core.errors import RewardError
from miles_core.rollout.rewards.text import Exact
from planted_faults import scaffolded

Good = scaffolded("rewards")
GOOD = (Good, Exact)


class NotANumber(Good):
    """Says nothing of short responses."""

    async def score(self, samples):
        return [math.nan if len(sample.response) < 2 else 1.0 for sample in samples]


class Words(Good):
    """Scores in words."""

    async def score(self, samples):
        return ["good"] * len(samples)


class TooFew(Good):
    """Leaves the last one out."""

    async def score(self, samples):
        return (await super().score(samples))[:-1]


class AlwaysZero(Good):
    """Nothing is ever right."""

    async def score(self, samples):
        return [0.0] * len(samples)


class Refuses(Good):
    """Cannot score its own example."""

    async def score(self, samples):
        return [RewardError("no")] * len(samples)


class EmptyMapping(Good):
    """No number at all."""

    async def score(self, samples):
        return [{}] * len(samples)


class Ranks(Good):
    """Scores the place in the list."""

    async def score(self, samples):
        return [float(place) for place, _ in enumerate(samples)]


class Sorted(Good):
    """Gives the scores back in order of size."""

    async def score(self, samples):
        return sorted(await super().score(samples))


class NeedsOne(Good):
    """Fails on an empty group."""

    async def score(self, samples):
        assert samples[0] is not None
        return await super().score(samples)


class OneForNone(Good):
    """Always answers something."""

    async def score(self, samples):
        return await super().score(samples) or [0.0]


class ZeroForUnknown(Good):
    """A row without a label earns 0."""

    async def score(self, samples):
        return [0.0 if isinstance(score, RewardError) else score for score in await super().score(samples)]


class Once(Good):
    """Works until it is closed."""

    closed = False

    async def setup(self):
        if self.closed:
            raise RuntimeError("closed")

    async def close(self):
        self.closed = True


class Exhausted(Good):
    """Has one answer in it."""

    count = 0

    async def score(self, samples):
        self.count += 1
        return (await super().score(samples))[: len(samples) if self.count == 1 else 0]


class ClosesOnce(Good):
    """A second close fails."""

    open = True

    async def close(self):
        if not self.open:
            raise RuntimeError("closed already")
        self.open = False


FAULTS = {
    "scores_are_finite_one_a_sample": (NotANumber, Words, TooFew, AlwaysZero, Refuses, EmptyMapping),
    "scores_follow_their_samples": (Ranks, Sorted),
    "no_samples_have_no_scores": (NeedsOne, OneForNone),
    "what_cannot_be_scored_is_an_error": (ZeroForUnknown,),
    "it_scores_again_after_setup": (Once, Exhausted),
    "close_is_idempotent": (ClosesOnce,),
}
