"""What a run writes as it goes: trackers, timeline, events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.events import EvaluationPoint, RunInfo
from miles_core.contracts.trackers import Tracker
from miles_core.data.group import Batch, Group
from miles_core.data.trajectory import Status
from miles_core.plugins import PluginManager
from miles_core.runs.metrics import MetricsStore

__all__ = ["Recorder", "batch_metrics"]


class Recorder:
    """Sends numbers to every tracker and phases to the timeline.

    Kinds: `train`, `rollout` and `eval` are functions of the run's seed in synchronous mode; `time`, `schedule` and
    `publish` are what depends on the machine.
    """

    def __init__(
        self, run: RunInfo, plugins: PluginManager, trackers: Sequence[Tracker[Any]], store: MetricsStore
    ) -> None:
        self.run = run
        self._plugins = plugins
        self._trackers = trackers
        self._store = store
        self.phase = "starting"
        for tracker in trackers:
            tracker.open(run.directory, run.config)

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics, kind=kind)

    def point(self, point: EvaluationPoint) -> None:
        prefix = f"{point.dataset}/{point.mode}"
        values = {
            f"{prefix}/mean": point.mean,
            f"{prefix}/standard_error": point.standard_error,
            f"{prefix}/truncated": point.truncated,
            f"{prefix}/missing": float(point.missing),
            f"{prefix}/prompts": float(point.prompts),
        }
        values |= {f"{prefix}/pass@{k}": value for k, value in point.pass_at.items()}
        self.log("eval", point.version, values)
        self.log("time", point.version, {f"evaluation/{prefix}": point.seconds})
        self.emit("miles_evaluation_finished", point=point)

    @contextmanager
    def span(self, lane: str, name: str, step: int, *, shown: bool = True) -> Iterator[None]:
        """A phase on the timeline, and its seconds among the metrics of kind `time`. One that runs beside others is not
        `shown` as what the run does now."""
        begin = time.time()
        before = self.phase
        if shown:
            self.phase = name
        try:
            yield
        finally:
            end = time.time()
            if shown:
                self.phase = before
            self._store.span(lane, name, step, begin, end)
            self.log("time", step, {f"{lane}/{name}": end - begin})

    def emit(self, hook: str, **arguments: object) -> None:
        self._plugins.emit(hook, run=self.run, **arguments)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def batch_metrics(batch: Batch, reward_key: str | None) -> dict[str, float]:
    """What a batch is, as numbers: rewards, lengths, statuses, and the staleness of what trains: of a group's oldest
    token (mean, max) and of tokens."""
    episodes = [e for e in batch.episodes if e.trajectories]
    rewards = [e.trajectories[0].scalar_reward(reward_key) for e in episodes]
    sampled = [sum(t.trainable_tokens for t in e.trajectories) for e in episodes]
    ages = [ages for g in batch.groups if len(ages := _ages(g, batch.policy_version))]
    tokens = np.concatenate([np.zeros(0, np.int64), *ages])
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1)) ** 0.5,
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "tokens/sampled": float(sum(sampled)),
        "tokens/total": float(sum(len(t) for t in batch.trajectories)),
        "tokens/sampled_per_episode": sum(sampled) / len(sampled),
        "episodes": float(len(episodes)),
        "truncated": sum(e.status is Status.TRUNCATED for e in episodes) / len(episodes),
        "staleness/mean": sum(int(a.max()) for a in ages) / len(ages) if ages else 0.0,
        "staleness/max": float(tokens.max(initial=0)),
        "staleness/token_mean": float(tokens.mean()) if len(tokens) else 0.0,
        "tokens/reweighted": float(
            sum(int((t.weights != 1).sum()) for t in batch.trajectories if t.weights is not None)
        ),
    }


def _ages(group: Group, policy_version: int) -> NDArray[np.int64]:
    """Staleness of the group's tokens that train, in versions."""
    columns = [t.versions[t.loss_mask].astype(np.int64) for t in group.trajectories]
    return policy_version - np.concatenate([np.zeros(0, np.int64), *columns])
