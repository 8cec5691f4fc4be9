"""No reward: for objectives that read none."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.rewards import Reward, Sample, Score
from miles_core.errors import RewardError

__all__ = ["NoReward"]


class NoReward(Reward[ComponentConfig]):
    """Every episode is worth 0."""

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """The laws of rewards are about scores that say something."""
        return Example(unavailable="it scores nothing")

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        return [0.0] * len(samples)
