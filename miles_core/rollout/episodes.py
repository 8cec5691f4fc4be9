"""Running one episode to an end, whatever happens inside it; and scoring a group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from miles_core.contracts.environments import EpisodeTask, GenerateEnvironment
from miles_core.contracts.rewards import Reward, Sample
from miles_core.data.group import Episode, Group
from miles_core.data.messages import text_of
from miles_core.data.trajectory import Status
from miles_core.errors import RewardError
from miles_core.rollout.admission import AdmissionClient

__all__ = ["run_episode", "score_group"]


async def run_episode(
    environment: GenerateEnvironment[Any], task: EpisodeTask, engine: AdmissionClient, *, timeout: float
) -> Episode:
    """One episode that always ends: past `timeout` seconds (those in which it was parked apart), or when anything in it
    raises, it is `failed` with the reason. Cancellation alone passes through."""
    try:
        async with asyncio.timeout(timeout) as engine.deadline:
            return await environment.generate(task, engine)
    except TimeoutError:
        error = f"the episode took more than [schedule] episode_timeout = {timeout:g} s"
    except Exception as failure:
        error = described(failure)
    return Episode(
        episode_id=task.episode_id,
        prompt_id=task.prompt.prompt_id,
        group_id=task.group_id,
        status=Status.FAILED,
        trajectories=(),
        error=error,
    )


def described(error: Exception) -> str:
    """An error in one line, with its notes: they name the plugin that raised it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"


async def score_group(
    group: Group,
    reward: Reward[Any],
    *,
    reward_key: str | None,
    timeout: float | None = None,
) -> Group:
    """The group with a reward on every episode that did not fail. An episode that cannot be scored, or not within
    `timeout` seconds, is `failed`, never worth 0. An episode that brought its own reward keeps it, and one that was
    scored before (in a group of which others were generated again) too."""
    scored = list(group.episodes)
    unscored = [
        i for i, e in enumerate(scored) if e.status in (Status.COMPLETED, Status.TRUNCATED) and e.reward is None
    ]
    samples = [_sample(group, scored[i]) for i in unscored]
    try:
        async with asyncio.timeout(timeout):
            scores: list[Any] = list(await reward.score(samples)) if samples else []
        if len(scores) != len(samples):
            raise RewardError(f"the reward gave {len(scores)} scores for {len(samples)} samples")
    except RewardError as error:
        scores = [error] * len(samples)
    except TimeoutError as error:
        late = f"the reward took more than [schedule] reward_timeout = {timeout:g} s" if timeout else str(error)
        scores = [RewardError(late)] * len(samples)
    except Exception as error:
        raised = RewardError(f"the reward ({type(reward).__name__}) raised {described(error)}")
        scores = [raised] * len(samples)
    for index, score in zip(unscored, scores, strict=True):
        problem = str(score) if isinstance(score, Exception) else _problem(score, reward_key)
        scored[index] = scored[index].as_failed(problem) if problem else scored[index].with_reward(score)
    return Group(group_id=group.group_id, prompt=group.prompt, episodes=tuple(scored))


def _sample(group: Group, episode: Episode) -> Sample:
    """The last thing that the policy said is the response; messages are the whole conversation."""
    said = [m for m in episode.messages if m["role"] == "assistant"]
    response = text_of(said[-1]) if said else ""
    return Sample(prompt=group.prompt, response=response, messages=episode.messages, episode=episode)


def _problem(score: object, reward_key: str | None) -> str:
    """What is wrong with a score; empty when it can train."""
    if isinstance(score, Mapping):
        if reward_key is None or reward_key not in score:
            return f"the reward is a mapping with keys {sorted(score)}: [reward] reward_key must name one of them"
        return next((p for value in score.values() if (p := _problem(value, None))), "")
    if isinstance(score, bool) or not isinstance(score, int | float):
        return f"the reward is {score!r}, expected a number"
    return "" if math.isfinite(score) else f"the reward is {score}"
