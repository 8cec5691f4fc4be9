"""Episodes that are in the data already: the conversations of the rows, for supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

import numpy as np

from miles_core.contracts.component import ComponentConfig, Conflict, Example, Workbench
from miles_core.contracts.engines import EngineClient
from miles_core.contracts.environments import EpisodeTask, GenerateEnvironment
from miles_core.data.group import Episode
from miles_core.data.segments import encode_segments
from miles_core.data.trajectory import NOT_SAMPLED, Status, Trajectory
from miles_core.errors import EnvironmentFailure

__all__ = ["DATA_VERSION", "Supervised", "SupervisedConfig"]

DATA_VERSION = 0
"""Version of tokens that come from data: they were there before the first step."""


class SupervisedConfig(ComponentConfig):
    """Section `[environment]` of `supervised`."""

    train: Literal["all", "last"] = "all"
    """Which turns of the assistant train."""


class Supervised(GenerateEnvironment[SupervisedConfig]):
    """Renders a row's conversation with the model's family; what the assistant wrote, stop tokens included, trains.

    No engine is asked. A row in which the assistant says nothing trains nothing, and is in no denominator.
    """

    Config = SupervisedConfig
    conflicts = (
        Conflict(
            key="schedule.mode",
            values=("async",),
            reason="nothing is sampled, so there is nothing to overlap with training",
        ),
    )

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """The laws of environments are about what an engine sampled."""
        return Example(unavailable="its episodes are the data's, and ask no engine")

    async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
        """See `GenerateEnvironment.generate`. Raises `EnvironmentFailure` for a row longer than `max_tokens`."""
        prompt = task.prompt
        segments = self.family.segments(prompt.messages, tools=prompt.tools)
        ids, trains = encode_segments(segments, self.tokenizer)
        if 0 < task.max_tokens < len(ids):
            raise EnvironmentFailure(
                f"row {prompt.prompt_id} has {len(ids)} tokens, more than sampling.max_tokens = {task.max_tokens}; "
                "raise it, or shorten the row"
            )
        mask = np.array(trains, dtype=np.bool_)
        if self.config.train == "last":
            gaps = np.flatnonzero(~mask)
            said = np.flatnonzero(mask)
            before = gaps[gaps < said[-1]] if len(said) else gaps
            mask[: before[-1] + 1 if len(before) else 0] = False
        trajectory = Trajectory(
            token_ids=np.array(ids, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            versions=np.where(mask, DATA_VERSION, NOT_SAMPLED).astype(np.int32),
            prompt_id=prompt.prompt_id,
            group_id=task.group_id,
            episode_id=task.episode_id,
            trajectory_id=f"{task.episode_id}/0",
        )
        return Episode(
            episode_id=task.episode_id,
            prompt_id=prompt.prompt_id,
            group_id=task.group_id,
            status=Status.COMPLETED,
            trajectories=(trajectory,),
            metrics={"trained_tokens": float(mask.sum())},
            messages=prompt.messages,
        )
