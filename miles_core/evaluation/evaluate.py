"""Shared evaluation: measure the policy on the rollout engines, under the version they serve."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import GenerateEnvironment
from miles_core.contracts.events import EvaluationPoint
from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.seeds import derive_seed
from miles_core.data.trajectory import Status
from miles_core.errors import MilesError
from miles_core.evaluation.statistics import mean_and_error, pass_at_k
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.producer import evaluation_tasks, run_all

__all__ = ["EvaluationSet", "evaluate"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """What to measure: prompts, how many samples of each, and how to sample them (`mode` names it in the report)."""

    name: str
    mode: str
    prompts: tuple[Prompt, ...]
    samples: int
    sampling: Sampling
    max_tokens: int = 0


async def evaluate(
    dataset: EvaluationSet,
    environment: GenerateEnvironment[Any],
    hold: EngineHold,
    score: Callable[[Group], Awaitable[Group]],
    *,
    version: int,
    seed: int,
    timeout: float,
    reward_key: str | None,
) -> tuple[EvaluationPoint, list[Episode]]:
    """One point. Raises `MilesError` when a token was sampled under another version than `version`: a point is filed
    under the version it measured, or refused."""
    begin = time.perf_counter()
    tasks = evaluation_tasks(
        dataset.prompts,
        dataset.samples,
        dataset.sampling,
        name=f"eval-{dataset.name}-{dataset.mode}",
        seeds=lambda prompt_id, k: derive_seed(seed, "evaluation", dataset.name, prompt_id, k),
        max_tokens=dataset.max_tokens,
    )
    episodes = await run_all(hold, environment, tasks, timeout=timeout, ordered=True)
    _refuse_other_versions(dataset, episodes, version)
    per_prompt: list[list[float]] = []
    scored: list[Episode] = []
    missing = 0
    for index, prompt in enumerate(dataset.prompts):
        own = tuple(episodes[index * dataset.samples : (index + 1) * dataset.samples])
        group = await score(Group(group_id=own[0].group_id, prompt=prompt, episodes=own))
        scored += group.episodes
        rewards = [e.trajectories[0].scalar_reward(reward_key) for e in group.episodes if e.reward is not None]
        missing += len(own) - len(rewards)
        per_prompt.append(rewards)
    if not any(per_prompt):
        reason = next((e.error for e in scored if e.error), "no reward")
        raise MilesError(
            f"evaluation of {dataset.name!r}: none of {len(episodes)} episodes was scored; first: {reason}"
        )
    mean, error = mean_and_error(per_prompt)
    point = EvaluationPoint(
        dataset=dataset.name,
        version=version,
        mode=dataset.mode,
        prompts=len(dataset.prompts),
        samples=dataset.samples,
        mean=mean,
        standard_error=error,
        truncated=sum(e.status is Status.TRUNCATED for e in scored) / len(scored),
        missing=missing,
        pass_at=_pass_at(per_prompt, dataset.samples),
        seconds=time.perf_counter() - begin,
    )
    return point, scored


def _refuse_other_versions(dataset: EvaluationSet, episodes: Sequence[Episode], version: int) -> None:
    for episode in episodes:
        for trajectory in episode.trajectories:
            found = set(trajectory.versions.tolist()) - {-1, version}
            if found:
                raise MilesError(
                    f"evaluation of {dataset.name!r} under version {version} got tokens of version {sorted(found)} in "
                    f"{trajectory.trajectory_id}: the point is refused"
                )


def _pass_at(per_prompt: Sequence[Sequence[float]], samples: int) -> dict[int, float]:
    """pass@1, 2, 4, … up to the data set's own samples a prompt; a reward of 1 or more counts as correct."""
    complete = [rewards for rewards in per_prompt if len(rewards) == samples]
    ks = [k for k in (2**i for i in range(samples.bit_length())) if k <= samples]
    if not complete or samples < 2:
        return {}
    return {
        k: sum(pass_at_k(sum(r >= 1.0 for r in rewards), samples, k) for rewards in complete) / len(complete)
        for k in ks
    }
