"""One prompt, one generation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.environments import EpisodeTask, GenerateEnvironment
from miles_core.data.group import Episode, Prompt
from miles_core.errors import EnvironmentFailure
from miles_core.rollout.recorder import TrajectoryRecorder, status_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from miles_core.contracts.engines import EngineClient, Generation, Sampling
    from miles_core.contracts.families import ModelFamily, Tokenizer

__all__ = ["SingleTurn", "SingleTurnConfig", "generation_metrics", "sampling_of_turn"]


class SingleTurnConfig(ComponentConfig):
    """Section `[environment]` of `single_turn`; it has no keys of its own."""


class SingleTurn(GenerateEnvironment[SingleTurnConfig]):
    """Renders the prompt with the model's family and samples once.

    A lone stop token is a completed episode of one sampled token and an empty answer. An empty completion keeps the
    prompt and trains nothing: `aborted` when the engine aborted it, otherwise `completed` with an empty answer.
    """

    Config = SingleTurnConfig

    def __init__(self, config: SingleTurnConfig) -> None:
        super().__init__(config)
        self._rendered: tuple[Prompt, NDArray[np.int32]] | None = None

    async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
        """See `GenerateEnvironment.generate`. Raises `EnvironmentFailure` for a prompt that fills `max_tokens`."""
        recorder = TrajectoryRecorder(task)
        recorder.append_prompt(self._render(task.prompt))
        sampling = sampling_of_turn(task, recorder, self.family, self.tokenizer)
        if sampling is None:
            raise EnvironmentFailure(
                f"prompt {task.prompt.prompt_id} has {len(recorder.ids)} tokens, which leaves none of max_tokens "
                f"{task.max_tokens} to sample; shorten the prompt or raise the limit"
            )
        generation = await engine.generate(recorder.ids, sampling, routing_key=task.episode_id, priority=task.priority)
        recorder.append_generation(generation)
        status = status_of(generation.finish_reason)
        reply = self.family.parse(generation.token_ids.tolist(), self.tokenizer, tools=task.prompt.tools)
        trajectory = recorder.build(status)
        return Episode(
            episode_id=task.episode_id,
            prompt_id=task.prompt.prompt_id,
            group_id=task.group_id,
            status=trajectory.status,
            trajectories=(trajectory,),
            metrics=generation_metrics([generation]),
            messages=(*task.prompt.messages, reply.as_message()),
        )

    def _render(self, prompt: Prompt) -> NDArray[np.int32]:
        """The prompt's ids; those of the last prompt are kept, since a group asks for them `group_size` times."""
        if self._rendered is None or self._rendered[0] is not prompt:
            ids = self.family.render(prompt.messages, self.tokenizer, tools=prompt.tools, add_generation_prompt=True)
            self._rendered = (prompt, np.array(ids, np.int32))
        return self._rendered[1]


def sampling_of_turn(
    task: EpisodeTask, recorder: TrajectoryRecorder, family: ModelFamily[Any], tokenizer: Tokenizer
) -> Sampling | None:
    """Sampling of the next turn: its own seed, the family's stop tokens, and no more tokens than `max_tokens` leaves.

    None when nothing is left.
    """
    room = recorder.room
    if room == 0:
        return None
    limit = task.sampling.max_new_tokens
    stops = {tokenizer.special(token) for token in family.stop_tokens()} | set(task.sampling.stop_token_ids)
    return dataclasses.replace(
        task.sampling,
        max_new_tokens=limit if room is None else min(limit, room),
        stop_token_ids=tuple(sorted(stops)),
        seed=task.turn_seed(recorder.turns),
    )


def generation_metrics(generations: list[Generation]) -> dict[str, float]:
    """Numbers of an episode for the report; seconds are wall time."""
    return {
        "turns": float(len(generations)),
        "prompt_tokens": float(sum(g.prompt_tokens for g in generations)),
        "cached_tokens": float(sum(g.cached_tokens for g in generations)),
        "response_tokens": float(sum(len(g.token_ids) for g in generations)),
        "generate_seconds": sum(g.finished - g.started for g in generations),
    }
