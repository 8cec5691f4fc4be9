"""Where a version is measured: on the rollout engines, on engines of its own, or by a function of the user's."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from miles_core.config.run import RunConfig
from miles_core.contracts.engines import EngineStart
from miles_core.contracts.events import EvaluationPoint
from miles_core.contracts.launchers import Launcher, ProcessSpec
from miles_core.data.group import Episode
from miles_core.engines.pool import EnginePool
from miles_core.errors import EnvironmentFailure, MilesError
from miles_core.evaluation.evaluate import EvaluationSet, evaluate
from miles_core.evaluation.external import points_of
from miles_core.evaluation.likelihood import held_out_loss
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.producer import Producer, Score
from miles_core.runs.atomic import begin_directory, complete_directory
from miles_core.runs.components import Components
from miles_core.runs.directory import RunDirectory
from miles_core.runs.publishing import Publisher
from miles_core.runs.trainer import TrainerClient

__all__ = ["Dedicated", "EvaluationEngines", "External", "Measured", "Placement", "Shared", "placement_of"]

_POLL = 0.1
_CONTROL_DEADLINE = 2.0
"""Seconds in which an evaluation engine answers, or is taken for gone: training waits for the hand-over."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A point, and the episodes it came from, where the placement has them."""

    point: EvaluationPoint
    episodes: Sequence[Episode] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationEngines:
    """The engines of dedicated evaluation: how they were started, and where they are."""

    start: EngineStart
    urls: Sequence[str]


class Placement(Protocol):
    """How a version gets to where it is measured, and is. Whatever goes wrong is a `MilesError`."""

    beside: ClassVar[bool]
    """Whether `measure` runs beside training, which waits for `hand_over` alone."""

    async def hand_over(self, version: int) -> None:
        """Take the weights that the trainer holds, which are those of `version`."""
        ...

    def measure(self, version: int) -> AsyncGenerator[Measured, None]:
        """The points of the version that was handed over last. Raises instead of giving a point of another one."""
        ...

    async def repair(self) -> None:
        """Make the next hand-over possible, after one that failed, or a measurement that did."""
        ...

    async def close(self) -> None: ...


class _Sampled:
    """Measures data sets on engines."""

    def __init__(self, config: RunConfig, parts: Components, sets: Sequence[EvaluationSet], score: Score) -> None:
        self._config = config
        self._parts = parts
        self._sets = sets
        self._score = score

    async def _evaluate(self, dataset: EvaluationSet, hold: EngineHold, version: int) -> Measured:
        point, episodes = await evaluate(
            dataset,
            self._parts.environment,
            hold,
            self._score,
            version=version,
            seed=self._config.run.seed,
            timeout=self._config.schedule.episode_timeout,
            reward_key=self._config.reward.reward_key,
        )
        return Measured(point=point, episodes=episodes)


class Shared(_Sampled):
    """On the rollout engines, which hold the version: new training episodes wait, running ones go on."""

    beside: ClassVar[bool] = False

    def __init__(
        self,
        config: RunConfig,
        parts: Components,
        sets: Sequence[EvaluationSet],
        score: Score,
        *,
        hold: EngineHold,
        producer: Producer,
        trainer: TrainerClient,
    ) -> None:
        super().__init__(config, parts, sets, score)
        self._hold = hold
        self._producer = producer
        self._trainer = trainer

    async def hand_over(self, version: int) -> None:
        """It was published."""

    async def measure(self, version: int) -> AsyncGenerator[Measured, None]:
        self._producer.hold()
        try:
            for dataset in self._sets:
                yield await self._measure(dataset, version)
        finally:
            await self._producer.release()

    async def _measure(self, dataset: EvaluationSet, version: int) -> Measured:
        if self._config.run.mode != "supervised":
            return await self._evaluate(dataset, self._hold, version)
        point, episodes = await held_out_loss(
            dataset,
            self._parts.environment,
            self._hold,
            self._trainer.logprobs,
            version=version,
            timeout=self._config.schedule.episode_timeout,
        )
        return Measured(point=point, episodes=episodes)

    async def repair(self) -> None:
        """Publishing looks after the rollout engines."""

    async def close(self) -> None: ...


class Dedicated(_Sampled):
    """On engines of its own. They get the version by the run's transport, as a fleet of their own: in one verified
    transaction, from the bytes that the rollout engines got."""

    beside: ClassVar[bool] = True

    def __init__(
        self,
        config: RunConfig,
        parts: Components,
        sets: Sequence[EvaluationSet],
        score: Score,
        *,
        engines: EvaluationEngines,
        publisher: Publisher,
    ) -> None:
        super().__init__(config, parts, sets, score)
        assert parts.evaluation_engine is not None
        self._engine = parts.evaluation_engine
        self._start = engines.start
        self._publisher = publisher
        self._receiver = parts.transport.receiver(engines.start.run_directory)
        self._pool = self._pool_of(engines.urls)

    def _pool_of(self, urls: Sequence[str]) -> EnginePool:
        return EnginePool(
            urls,
            wait_for_weights=True,
            deadline=self._config.schedule.episode_timeout,
            control_deadline=_CONTROL_DEADLINE,
        )

    async def hand_over(self, version: int) -> None:
        done = await self._publisher.hand_over(version, self._pool, self._receiver)
        if done.drained:
            raise MilesError(f"evaluation engines did not take version {version}: {dict(self._pool.drained)}")

    async def measure(self, version: int) -> AsyncGenerator[Measured, None]:
        hold = EngineHold(self._pool)
        for dataset in self._sets:
            yield await self._evaluate(dataset, hold, version)

    async def repair(self) -> None:
        """Start the engines anew."""
        await self._pool.close()
        await self._engine.stop()
        self._pool = self._pool_of(await self._engine.start(self._parts.launcher, self._start))

    async def close(self) -> None:
        await self._pool.close()
        await self._receiver.close()
        await self._engine.stop()


class External:
    """By a function in a process of its own, that gets a directory of weights, written beside training."""

    beside: ClassVar[bool] = True

    def __init__(
        self, function: str, directory: RunDirectory, launcher: Launcher[Any], trainer: TrainerClient, *, timeout: float
    ) -> None:
        self._function = function
        self._directory = directory
        self._launcher = launcher
        self._trainer = trainer
        self._timeout = timeout
        self._growing: Path | None = None

    async def hand_over(self, version: int) -> None:
        self._growing = begin_directory(self._directory.evaluated_weights(version))
        await self._trainer.begin_export(self._growing)

    async def measure(self, version: int) -> AsyncGenerator[Measured, None]:
        begin = time.perf_counter()
        path = self._directory.evaluated_weights(version)
        await self._written(version, path)
        try:
            answer = await self._ask(path, version)
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        for point in points_of(answer, version=version, seconds=time.perf_counter() - begin):
            yield Measured(point=point)

    async def _written(self, version: int, path: Path) -> None:
        assert self._growing is not None, "a measurement without a hand-over"
        try:
            while not await self._trainer.finish_export(wait=False):
                await asyncio.sleep(_POLL)
            await asyncio.to_thread(complete_directory, self._growing, path)
        except Exception as error:
            await asyncio.to_thread(shutil.rmtree, self._growing, ignore_errors=True)
            raise MilesError(f"the weights of version {version} could not be written to {path}: {error}") from error

    async def _ask(self, path: Path, version: int) -> object:
        command = [sys.executable, "-m", "miles_core.evaluation.external", self._function, str(path), str(version)]
        try:
            process = await self._launcher.launch(
                ProcessSpec(
                    name="evaluation",
                    command=command,
                    log=self._directory.log_file("evaluation"),
                    ready_timeout=self._timeout,
                )
            )
        except EnvironmentFailure as error:
            raise MilesError(f"evaluation.callable = {self._function!r} gave no answer: {error}") from error
        await process.stop()
        return process.ready.get("answer")

    async def repair(self) -> None:
        """Every version has a directory and a process of its own."""

    async def close(self) -> None: ...


def placement_of(
    config: RunConfig,
    parts: Components,
    directory: RunDirectory,
    sets: Sequence[EvaluationSet],
    score: Score,
    *,
    hold: EngineHold,
    producer: Producer,
    trainer: TrainerClient,
    publisher: Publisher,
    engines: EvaluationEngines | None,
) -> Placement:
    """What `[evaluation] placement` names; `engines` are those of `dedicated`."""
    section = config.evaluation
    if section.placement == "external":
        return External(section.callable, directory, parts.launcher, trainer, timeout=section.timeout)
    if engines is not None:
        return Dedicated(config, parts, sets, score, engines=engines, publisher=publisher)
    return Shared(config, parts, sets, score, hold=hold, producer=producer, trainer=trainer)
