"""Evaluation inside a run: every data set under the current version, on the rollout engines."""

from __future__ import annotations

from miles_core.config.run import RunConfig
from miles_core.contracts.engines import Sampling
from miles_core.contracts.events import EvaluationPoint
from miles_core.data.group import Episode
from miles_core.data.parquet import write_rollouts
from miles_core.evaluation.evaluate import EvaluationSet, evaluate
from miles_core.evaluation.likelihood import held_out_loss
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.producer import Producer, Score
from miles_core.runs.components import Components
from miles_core.runs.directory import RunDirectory
from miles_core.runs.held_out import evaluation_sets
from miles_core.runs.recording import Recorder
from miles_core.runs.trainer import TrainerClient

__all__ = ["Evaluator"]


class Evaluator:
    """Measures, writes the episodes down, and records the points."""

    def __init__(
        self,
        config: RunConfig,
        parts: Components,
        directory: RunDirectory,
        record: Recorder,
        hold: EngineHold,
        score: Score,
        trainer: TrainerClient,
        *,
        sampling: Sampling,
    ) -> None:
        self.sets = evaluation_sets(config, parts, sampling)
        self._config = config
        self._parts = parts
        self._directory = directory
        self._record = record
        self._hold = hold
        self._score = score
        self._trainer = trainer

    async def measure(self, producer: Producer, version: int) -> list[EvaluationPoint]:
        """A point a data set. New training episodes wait meanwhile, running ones go on."""
        points: list[EvaluationPoint] = []
        producer.hold()
        try:
            for dataset in self.sets:
                with self._record.span("rollout", "evaluate", version):
                    point, episodes = await self._measure(dataset, version)
                write_rollouts(
                    self._directory.evaluation_file(dataset.name, point.mode, version),
                    [t for e in episodes for t in e.trajectories],
                    step=version,
                    policy_version=version,
                )
                points.append(point)
                self._record.point(point)
        finally:
            await producer.release()
        return points

    async def _measure(self, dataset: EvaluationSet, version: int) -> tuple[EvaluationPoint, list[Episode]]:
        timeout, environment = self._config.schedule.episode_timeout, self._parts.environment
        if self._config.run.mode == "supervised":
            return await held_out_loss(
                dataset, environment, self._hold, self._trainer.logprobs, version=version, timeout=timeout
            )
        return await evaluate(
            dataset,
            environment,
            self._hold,
            self._score,
            version=version,
            seed=self._config.run.seed,
            timeout=timeout,
            reward_key=self._config.reward.reward_key,
        )
