"""Another reward for each kind of row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.rewards import Reward, Sample, Score
from miles_core.data.group import Prompt
from miles_core.errors import RewardError, nearest
from miles_core.rollout.rewards.answers import named

__all__ = ["ByMetadata", "ByMetadataConfig"]


class ByMetadataConfig(ComponentConfig):
    """Section `[reward]` of `by_metadata`."""

    key: str = "reward"
    """Metadata field that names the row's reward."""
    rewards: dict[str, dict[str, Any]] = Field(min_length=1)
    """`[reward.rewards.NAME]`: `use` and the options of the reward of rows that say NAME."""


class ByMetadata(Reward[ByMetadataConfig]):
    """Each sample is scored by the reward that its row names. A row that names none, or another, cannot be scored."""

    Config = ByMetadataConfig

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Rows of two kinds, in turn."""
        question = ({"role": "user", "content": "2 + 2 ="},)
        exact, overlap = (
            Prompt(prompt_id=f"{name}:1", messages=question, label="4", metadata={"reward": name})
            for name in ("exact", "f1")
        )
        return Example(
            settings={"rewards": {"exact": {}, "f1": {}}},
            inputs=((exact, "4"), (overlap, "it is 4"), (exact, "it is 4"), (overlap, "")),
        )

    def __init__(self, config: ByMetadataConfig) -> None:
        super().__init__(config)
        self._rewards: dict[str, Reward[Any]] = {}

    async def setup(self) -> None:
        """Builds and sets up every reward. Raises `UnknownNameError` and validation errors before the run starts."""
        from miles_core.plugins import PluginManager

        plugins = PluginManager.discover()
        for name, section in self.config.rewards.items():
            settings = dict(section)
            self._rewards[name] = plugins.create(
                "miles_rewards",
                settings.pop("use", name),
                settings,
                Reward,
            )
        for reward in self._rewards.values():
            await reward.setup()

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        if not self._rewards:
            await self.setup()
        scores: list[Score | RewardError] = [self._unknown(sample) for sample in samples]

        async def part(name: str) -> None:
            places = [i for i, s in enumerate(samples) if s.prompt.metadata.get(self.config.key) == name]
            if not places:
                return
            try:
                found = await self._rewards[name].score([samples[i] for i in places])
            except RewardError as error:
                found = [named(error, samples[i]) for i in places]
            for place, score in zip(places, found, strict=True):
                scores[place] = score

        await asyncio.gather(*(part(name) for name in self._rewards))
        return scores

    async def close(self) -> None:
        """See `Reward.close`."""
        rewards, self._rewards = self._rewards, {}
        for reward in rewards.values():
            await reward.close()

    def _unknown(self, sample: Sample) -> RewardError:
        found = sample.prompt.metadata.get(self.config.key)
        return RewardError(
            f"episode {sample.episode.episode_id}: metadata field {self.config.key!r} of prompt "
            f"{sample.prompt.prompt_id} is {found!r}; {nearest(str(found), list(self.config.rewards))}"
        )
