"""Rewards: what an episode is worth."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.contracts.component import Component, ConfigT
from miles_core.data.group import Episode, Prompt
from miles_core.errors import RewardError

__all__ = ["Reward", "Sample", "Score"]

Score = float | Mapping[str, float]
"""A finite number, or a mapping of finite numbers of which `[reward] reward_key` names the one that trains."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a reward sees of one episode: the prompt, the final answer's text, the whole conversation."""

    prompt: Prompt
    response: str
    messages: tuple[Mapping[str, Any], ...]
    episode: Episode


class Reward(Component[ConfigT], abc.ABC):
    """Scores the episodes of one group together.

    Called in the controller's event loop: blocking work belongs in a thread or process. Results come back in the
    order of `samples`, one each. A sample that cannot be scored gets a `RewardError` in place of a score (its episode
    becomes `failed`, never 0); raised, it fails the whole group. `setup` and `close` bracket the run.
    """

    async def setup(self) -> None:
        """Start what the reward needs (processes, connections). Default: nothing."""

    @abc.abstractmethod
    async def score(self, samples: Sequence[Sample]) -> Sequence[Score | RewardError]:
        """One finite score, or the error that prevented it, a sample, in order."""

    async def close(self) -> None:
        """Release everything, also after a failure. Default: nothing."""
