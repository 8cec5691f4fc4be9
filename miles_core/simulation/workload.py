"""What episodes will do, drawn a group at a time."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from miles_core.data.seeds import derive_seed
from miles_core.rollout.policy import EpisodeStart
from miles_core.simulation.distributions import Distribution
from miles_core.simulation.scenario import EpisodesSection

__all__ = ["DrawnWorkload", "Plan", "Workload"]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One episode: tokens of its prompt; of each turn, tokens sampled, seconds and tokens of the tool call behind it (0
    where none follows). `fails` is the turn at whose end it fails, −1 for none."""

    prompt: int
    tokens: list[int]
    tool_seconds: list[float]
    tool_tokens: list[int]
    fails: int = -1


class Workload(Protocol):
    """Where a simulation gets its episodes from."""

    def plan(self, start: EpisodeStart) -> Plan: ...

    def reward_seconds(self, group_id: str) -> float:
        """Seconds of scoring this group."""
        ...

    def dropped(self, group_id: str) -> bool:
        """Whether a filter drops this group."""
        ...


class DrawnWorkload:
    """Draws by (seed, group, attempt): a function of the group alone, whatever the schedule."""

    def __init__(self, episodes: EpisodesSection, *, group_size: int, seed: int) -> None:
        self._episodes = episodes
        self._size = group_size
        self._seed = seed
        self._key = ""
        self._plans: list[Plan] = []

    def plan(self, start: EpisodeStart) -> Plan:
        """Plans of a group are drawn together: the scheduler starts its episodes one behind another."""
        key, _, index = start.episode_id.rpartition("/")
        if key != self._key:
            self._key, self._plans = key, self._draw(key, start.group_id)
        return self._plans[int(index)]

    def reward_seconds(self, group_id: str) -> float:
        return self._one(self._episodes.reward_seconds, "reward", group_id)

    def dropped(self, group_id: str) -> bool:
        share = self._episodes.filtered
        return share > 0 and bool(self._of("filter", group_id).random() < share)

    def _one(self, distribution: Distribution, *parts: str) -> float:
        """One number for a group; what is constant needs no generator."""
        if distribution.value is not None:
            return min(distribution.value, distribution.at_most)
        return float(distribution.draw(self._of(*parts), (1,))[0])

    def _of(self, *parts: object) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(derive_seed(self._seed, *parts)))

    def _draw(self, key: str, group_id: str) -> list[Plan]:
        episodes, size = self._episodes, self._size
        generator = self._of("episodes", key)
        turns = np.maximum(np.rint(episodes.turns.draw(generator, (size,))), 1).astype(np.int64)
        most = int(turns.max())
        tokens = np.maximum(np.rint(episodes.tokens.draw(generator, (size, most))), 1).astype(np.int64).tolist()
        seconds = episodes.tool_seconds.draw(generator, (size, most))
        added = np.rint(episodes.tool_tokens.draw(generator, (size, most))).astype(np.int64)
        if not episodes.ends_with_tool:
            last = (np.arange(size), turns - 1)
            seconds[last], added[last] = 0.0, 0
        fails = [-1] * size
        if episodes.failures:
            fate = generator.random((2, size))
            where = (fate[1] * turns).astype(np.int64)
            fails = np.where(fate[0] < episodes.failures, where, -1).tolist()
        prompt = round(self._one(episodes.prompt_tokens, "prompt", group_id))
        return [
            Plan(prompt, row[:n], tool[:n], more[:n], failing)
            for row, tool, more, failing, n in zip(
                tokens, seconds.tolist(), added.tolist(), fails, turns.tolist(), strict=True
            )
        ]
