"""Held-out loss: how likely the policy finds conversations that are written already."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.environments import GenerateEnvironment
from miles_core.contracts.events import EvaluationPoint
from miles_core.data.group import Episode
from miles_core.data.trajectory import Trajectory
from miles_core.errors import MilesError
from miles_core.evaluation.evaluate import EvaluationSet
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.producer import evaluation_tasks, run_all

__all__ = ["held_out_loss", "loss_and_error"]

LogProbs = Callable[[Sequence[Trajectory]], Awaitable[Sequence[NDArray[np.float32]]]]


async def held_out_loss(
    dataset: EvaluationSet,
    environment: GenerateEnvironment[Any],
    hold: EngineHold,
    logprobs: LogProbs,
    *,
    version: int,
    timeout: float,
) -> tuple[EvaluationPoint, list[Episode]]:
    """One point: `mean` is the loss in nats a trainable token, lower is better; `missing` are rows without one.

    Raises `MilesError` when a row could not be rendered, or none has a trainable token: a loss of nothing is not 0.
    """
    begin = time.perf_counter()
    name = dataset.name
    tasks = evaluation_tasks(
        dataset.prompts,
        1,
        dataset.sampling,
        name=f"eval-{name}-loss",
        seeds=lambda *_: 0,
        max_tokens=dataset.max_tokens,
    )
    episodes = await run_all(hold, environment, tasks, timeout=timeout, ordered=False)
    for episode in episodes:
        if episode.error:
            raise MilesError(f"evaluation of {name!r}: {episode.error}")
    trajectories = [t for e in episodes for t in e.trajectories]
    scored = await logprobs(trajectories)
    rows = [
        (-float(column[t.loss_mask].sum(dtype=np.float64)), t.trainable_tokens)
        for t, column in zip(trajectories, scored, strict=True)
        if t.trainable_tokens
    ]
    if not rows:
        raise MilesError(f"evaluation of {name!r}: the assistant says nothing in any of its {len(trajectories)} rows")
    loss, error = loss_and_error(rows)
    point = EvaluationPoint(
        dataset=name,
        version=version,
        mode="loss",
        prompts=len(trajectories),
        samples=1,
        mean=loss,
        standard_error=error,
        truncated=0.0,
        missing=len(trajectories) - len(rows),
        seconds=time.perf_counter() - begin,
    )
    return point, episodes


def loss_and_error(rows: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Mean over the tokens of all rows, from (sum, tokens) of each, and the ratio's standard error over rows.

    >>> loss_and_error([(2.0, 1), (4.0, 3)])
    (1.5, 0.25)
    """
    tokens = sum(count for _, count in rows)
    mean = math.fsum(total for total, _ in rows) / tokens
    if len(rows) < 2:
        return mean, 0.0
    squares = math.fsum((total - mean * count) ** 2 for total, count in rows)
    return mean, math.sqrt(squares * len(rows) / (len(rows) - 1)) / tokens
