"""A reward that is a Python function of the user's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.rewards import Reward, Sample, Score
from miles_core.errors import RewardError
from miles_core.rollout.functions import load_function
from miles_core.rollout.rewards.answers import named

__all__ = ["CallableConfig", "CallableReward"]


class CallableConfig(ComponentConfig):
    """Section `[reward]` of `callable`."""

    function: str = Field(pattern=r".+:[A-Za-z_]\w*$")
    """`module:function`, or `path/to/file.py:function`."""
    per: Literal["sample", "group"] = "sample"
    """What one call sees: `sample`, one `Sample`, gives one score; `group`, the list of a group's samples, gives a list
    of scores in their order."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of every call."""


class CallableReward(Reward[CallableConfig]):
    """Calls the function: an async one in the event loop, any other in a thread.

    A score is a number or a mapping of numbers. What a per-sample function raises fails its episode; what a
    per-group function raises fails the group.
    """

    Config = CallableConfig

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """A function that compares the answer with the label."""
        path = bench.directory / "score.py"
        path.write_text(_EXAMPLE, encoding="utf-8")
        return Example(settings={"function": f"{path}:score"})

    def __init__(self, config: CallableConfig) -> None:
        super().__init__(config)
        self._function: Callable[..., Any] | None = None

    async def setup(self) -> None:
        """Imports the function, so that a wrong name stops the run before it starts. Raises `ConfigError`."""
        self._function = load_function(self.config.function, key="reward.function")

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        if self._function is None:
            await self.setup()
        if self.config.per == "sample" and inspect.iscoroutinefunction(self._function):
            return list(await asyncio.gather(*(self._one(sample) for sample in samples)))
        if self.config.per == "sample":
            return await asyncio.to_thread(lambda: [self._one_blocking(sample) for sample in samples])
        try:
            scores = await self._call(list(samples))
        except Exception as error:
            raise self._failed(error) from error
        if isinstance(scores, Mapping | str) or not isinstance(scores, Sequence) or len(scores) != len(samples):
            raise RewardError(
                f"{self.config.function} returned {scores!r:.200}, expected a list of {len(samples)} scores"
            )
        return list(scores)

    def _one_blocking(self, sample: Sample) -> Score | RewardError:
        assert self._function is not None
        try:
            score: Score = self._function(sample, **self.config.arguments)
        except Exception as error:
            return named(self._failed(error), sample)
        return score

    async def _one(self, sample: Sample) -> Score | RewardError:
        try:
            score: Score = await self._call(sample)
        except Exception as error:
            return named(self._failed(error), sample)
        return score

    async def _call(self, argument: Any) -> Any:
        assert self._function is not None
        if inspect.iscoroutinefunction(self._function):
            return await self._function(argument, **self.config.arguments)
        return await asyncio.to_thread(self._function, argument, **self.config.arguments)

    def _failed(self, error: Exception) -> RewardError:
        return RewardError(f"{self.config.function} raised {type(error).__name__}: {error}")


_EXAMPLE = """
def score(sample):
    if sample.prompt.label is None:
        raise ValueError("the row has no label")
    return float(sample.response == sample.prompt.label)
"""
