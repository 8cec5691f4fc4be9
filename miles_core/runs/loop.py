"""The run loop: source → scheduler → environment ↔ engines → reward → filter → batch → step → publish.

Synchronous and asynchronous runs share this loop; the mode is the scheduler's policy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from miles_core.config.load import LoadedConfig
from miles_core.contracts.backends import BackendStart
from miles_core.contracts.engines import EngineStart
from miles_core.contracts.events import EvaluationPoint, RunInfo
from miles_core.data.group import Batch, Group
from miles_core.data.parquet import write_rollouts
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.engines.pool import EnginePool
from miles_core.errors import RunDirectoryError
from miles_core.eventloop import run as run_loop
from miles_core.garbage import settle, unsettle
from miles_core.models.facts import model_facts
from miles_core.models.reference import resolve_model
from miles_core.plugins import PluginManager
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.producer import Producer
from miles_core.runs.atomic import atomic_directory, writing
from miles_core.runs.checkpointing import Checkpoints
from miles_core.runs.components import Components, build_components, sampling_of, stop_ids, trainer_processes
from miles_core.runs.directory import RunDirectory
from miles_core.runs.evaluating import Evaluator
from miles_core.runs.held_out import evaluation_sets
from miles_core.runs.metrics import MetricsStore
from miles_core.runs.placements import EvaluationEngines, placement_of
from miles_core.runs.publishing import Publisher
from miles_core.runs.recording import Recorder
from miles_core.runs.rollouts import StepMeter, make_producer, make_scheduler, policy_of, scorer
from miles_core.runs.teacher import Teacher
from miles_core.runs.trainer import TrainerClient
from miles_core.runs.wire import WireRecord

__all__ = ["RunResult", "train"]

First = TypeVar("First")
Second = TypeVar("Second")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended: steps taken in all, and the evaluation points of this process, in order."""

    directory: Path
    steps: int
    points: tuple[EvaluationPoint, ...]
    seconds: float


def train(
    loaded: LoadedConfig,
    plugins: PluginManager,
    directory: RunDirectory,
    *,
    observer: Callable[[Run], Any] | None = None,
) -> RunResult:
    """Run, or continue, a training run in `directory` (locked by the caller). `observer` is given the run before it
    starts, for a live panel."""
    run = Run(loaded, plugins, directory)
    if observer is not None:
        observer(run)
    return run_loop(run.run())


class Run:
    """One process's part of a run. Public attributes may be read while it goes (the live panel does)."""

    def __init__(self, loaded: LoadedConfig, plugins: PluginManager, directory: RunDirectory) -> None:
        self.config = loaded.config
        self.directory = directory
        self.plugins = plugins
        self.components: Components = build_components(self.config, plugins)
        self._loaded = loaded
        self.step = 0
        self.last: dict[str, float] = {}
        self.producer: Producer | None = None
        self.recorder: Recorder | None = None
        self._teacher: Teacher | None = None

    @property
    def points(self) -> list[EvaluationPoint]:
        """Evaluation points of this process so far, in the order in which they came."""
        return self._evaluator.points if hasattr(self, "_evaluator") else []

    async def run(self) -> RunResult:
        """Take the steps that are left. Everything started is stopped, also after a failure."""
        begin = time.perf_counter()
        info = RunInfo(
            run_id=self.config.run.name,
            directory=self.directory.path,
            config=self._loaded.resolved(),
            resumed=self.directory.ledger_file.exists(),
        )
        self.directory.remove_temporary()
        self._store = MetricsStore(self.directory.metrics_file)
        self._ledger = Ledger(self.directory.ledger_file)
        self._wire = WireRecord(self.directory.path / "wire.sqlite")
        self._record = self.recorder = Recorder(info, self.plugins, self.components.trackers, self._store)
        error: BaseException | None = None
        try:
            await self._start()
            await self._go_on()
        except BaseException as failure:
            error = failure
            raise
        finally:
            unsettle()
            failures = await self._stop()
            try:
                self._record.emit("miles_run_finished", error=error)
            finally:
                self._record.close()
                self._ledger.close()
                self._wire.close()
                self._store.close()
            if error is not None:
                for problem in failures:
                    error.add_note(f"while stopping: {type(problem).__name__}: {problem}")
            elif failures:
                raise ExceptionGroup("the run completed, but stopping it failed in part", failures)
        return RunResult(
            directory=self.directory.path,
            steps=self.step,
            points=tuple(self.points),
            seconds=time.perf_counter() - begin,
        )

    # Starting and stopping.

    async def _start(self) -> None:
        config, parts = self.config, self.components
        with self._record.span("controller", "start", 0):
            model = await asyncio.to_thread(resolve_model, config.model.path)
            tokenizer = load_tokenizer(model.directory)
            self._checkpoint = self._last_checkpoint()
            self.step = 0 if self._checkpoint is None else self._checkpoint[0]
            engine_start = EngineStart(
                model_directory=model.directory,
                dtype=config.model.dtype,
                run_directory=self.directory.path,
                wait_for_weights=True,
                policy_version=self.step,
                environment={},
            )
            try:
                async with asyncio.TaskGroup() as group:  # when one part fails, the others are stopped before we go on
                    engines = group.create_task(parts.engine.start(parts.launcher, engine_start))
                    measuring = group.create_task(self._start_evaluation_engine(engine_start))
                    group.create_task(self._start_trainer(model.directory))
                    group.create_task(self._start_teacher(tokenizer))
                    group.create_task(parts.reward.setup())
                    # A source may have much to import: not in the first step.
                    group.create_task(asyncio.to_thread(parts.source.prompt, 0))
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            urls = engines.result()
            facts = model_facts(model.directory)
            self._pool = EnginePool(
                urls,
                wait_for_weights=True,
                vocabulary=facts.vocabulary,
                experts_per_token=facts.experts_per_token,
                on_generation=self._wire.add,
            )
            self._publisher = Publisher(
                self._trainer,
                self._pool,
                parts.transport.receiver(self.directory.path),
                parts.engine,
                self._record,
                mode=config.schedule.pause,
                transport=config.transport.use,
            )
            self._rewind()
            async with self._publisher.turn():
                await self._publisher.publish(self.step)
        parts.environment.bind(parts.family, tokenizer)
        await parts.environment.setup()
        hold = EngineHold(self._pool, partial=config.schedule.partial, decode=tokenizer.decode)
        score, sampling = scorer(config, parts), sampling_of(config, stop_ids(parts, tokenizer))
        scheduler = make_scheduler(config, parts, self._ledger)
        self.producer = make_producer(config, parts, scheduler, hold, score, self._record, sampling=sampling)
        self._meter = StepMeter(self._record, self._pool, self.producer, config.reward.reward_key)
        placement = placement_of(
            config,
            parts,
            self.directory,
            evaluation_sets(config, parts, sampling),
            score,
            hold=hold,
            producer=self.producer,
            trainer=self._trainer,
            publisher=self._publisher,
            engines=measuring.result(),
        )
        self._evaluator = Evaluator(
            config.evaluation,
            placement,
            self.directory,
            self._record,
            self._store,
            last=config.run.steps,
        )
        settle()
        self._record.emit("miles_run_started")

    async def _start_evaluation_engine(self, start: EngineStart) -> EvaluationEngines | None:
        """The engines of dedicated evaluation, if there are any; their logs go under `evaluation`."""
        engine = self.components.evaluation_engine
        if engine is None:
            return None
        own = dataclasses.replace(start, run_directory=self.directory.path / "evaluation")
        return EvaluationEngines(start=own, urls=await engine.start(self.components.launcher, own))

    async def _start_teacher(self, tokenizer: FileTokenizer) -> None:
        section, engine = self.config.teacher, self.components.teacher
        if section is not None and engine is not None:
            self._teacher = Teacher(section, engine, temperature=self.config.sampling.temperature)
            place = self.directory.path / "teacher"
            await self._teacher.start(self.components.launcher, place, dtype=self.config.model.dtype, student=tokenizer)

    async def _start_trainer(self, model_directory: Path) -> None:
        config = self.config
        self._trainer = await TrainerClient.launch(
            self.components.launcher,
            log=self.directory.log_file("trainer"),
            processes=trainer_processes(config, self.plugins),
        )
        start = BackendStart(
            model_directory=model_directory,
            dtype=config.model.dtype,
            seed=config.run.seed,
            temperature=config.sampling.temperature,
            total_steps=config.run.steps,
        )
        await self._trainer.start(self._loaded.resolved(), start, self.directory.path)
        if self._checkpoint is not None:
            await self._trainer.load(self._checkpoint[1] / "backend")
        self._checkpoints = Checkpoints(
            self.directory,
            self._trainer,
            keep=config.run.keep_checkpoints,
            on_saved=lambda saved: self._record.emit("miles_checkpoint_saved", checkpoint=saved),
        )

    def _last_checkpoint(self) -> tuple[int, Path] | None:
        found = self.directory.checkpoints()
        return found[-1] if found else None

    def _rewind(self) -> None:
        """Bring ledger and metrics back to the checkpoint: later steps are taken again."""
        self._ledger.rewind(self.step)
        self._ledger.check()
        self._store.rewind(self.step)

    async def _stop(self) -> list[Exception]:
        """Stop in reverse order; every part is stopped even when one fails to. Returns what failed."""
        steps: list[Any] = []
        if self.producer is not None:
            steps.append(self.producer.stop)
        if hasattr(self, "_evaluator"):
            steps.append(self._evaluator.close)
        steps.append(self.components.environment.close)
        if hasattr(self, "_publisher"):
            steps.append(self._publisher.close)
        if hasattr(self, "_pool"):
            steps.append(self._pool.close)
        if hasattr(self, "_trainer"):
            steps.append(self._trainer.close)
        if self._teacher is not None:
            steps.append(self._teacher.close)
        if self.components.evaluation_engine is not None:
            steps.append(self.components.evaluation_engine.stop)
        steps += [self.components.engine.stop, self.components.reward.close, self.components.launcher.close]
        failures: list[Exception] = []
        for stop in steps:
            try:
                await stop()
            except Exception as failure:
                failures.append(failure)
        return failures

    # Steps.

    async def _go_on(self) -> None:
        try:
            await self._steps()
            await self._finish()
        except sqlite3.OperationalError:
            with writing("the ledger or the metrics", self.directory.path):
                raise

    async def _steps(self) -> None:
        await self._publisher.guarded(self._evaluator.started(self.step))
        while self.step < self.config.run.steps:
            with self._record.span("rollout", "generate", self.step + 1):
                groups = await self._collect()
            await self._checkpoints.finish(wait=False)
            await self._train(groups)
            await self._checkpoints.finish()
            await self._publisher.guarded(self._evaluator.stepped(self.step))
            last = self.step == self.config.run.steps
            checkpoint_every = self.config.run.checkpoint_every
            if last or (checkpoint_every and self.step % checkpoint_every == 0):
                with self._record.span("trainer", "checkpoint", self.step):
                    await self._checkpoints.begin(self.step)
        await self._checkpoints.finish()
        await self._publisher.guarded(self._evaluator.finish())

    async def _collect(self) -> Sequence[Group]:
        """The next batch. A step whose numbers must not depend on timing is generated again, from its start, when a
        request had to be sent again: an engine was lost meanwhile."""
        assert self.producer is not None
        deterministic = policy_of(self.config.schedule).waves
        while True:
            before = self._pool.retries
            groups = await self._publisher.guarded(self.producer.batch(self.step, self.step))
            if not deterministic or self._pool.retries == before:
                return groups
            self._ledger.rewind(self.step)
            await self.producer.restart(lambda: make_scheduler(self.config, self.components, self._ledger))
            async with self._publisher.turn():
                await self._publisher.publish(self.step)  # no engine starts with what it had cached

    async def _train(self, groups: Sequence[Group]) -> None:
        """One step, from a complete batch to engines that serve the new version."""
        number = self.step + 1
        batch = Batch(groups=tuple(groups), policy_version=self.step, step=self.step)
        changed: Batch = self.plugins.chain("miles_batch_ready", "batch", batch, run=self._record.run)
        if {g.group_id for g in changed.groups} != {g.group_id for g in batch.groups}:
            raise RunDirectoryError(
                "miles_batch_ready returned a batch of other groups; groups may not be added or lost"
            )
        self._wire.flush()
        self._record.emit("miles_before_train_step", batch=changed)
        if self._teacher is not None:
            with self._record.span("rollout", "teacher", number):
                changed = await self._teacher.annotate(changed)
        async with self._publisher.turn():
            with self._record.span("trainer", "train", number):
                report, _ = await _both(self._trainer.train_step(changed), self._while_training(changed))
            self._publisher.begin(number)
            self._ledger.move([g.group_id for g in changed.groups], "trained", step=self.step, version=number)
            self.step = number
            self.last = self._meter.step(changed, report)
            self._record.emit("miles_after_train_step", batch=changed, report=report)
            with self._record.span("trainer", "publish", number):
                await self._publisher.publish(number)

    async def _while_training(self, batch: Batch) -> None:
        """What can be done beside the optimizer step: the engines' own account of their time, and the batch to disk. In
        this order: the trainer has its batch before another thread begins to compute here."""
        step, path = batch.step + 1, self.directory.rollout_file(batch.step + 1)
        version = batch.policy_version
        await self._meter.engines(step)
        with writing(f"the batch of step {step}", path):
            await asyncio.to_thread(write_rollouts, path, batch.trajectories, step=step, policy_version=version)

    async def _finish(self) -> None:
        if self.config.run.export:
            with (
                self._record.span("trainer", "export", self.step),
                writing("the export", self.directory.export_directory),
                atomic_directory(self.directory.export_directory) as temporary,
            ):
                await self._trainer.export(temporary)
        self._record.log("time", self.step, {"trainer/peak_memory": float(await self._trainer.peak_memory())})
        self._ledger.check()


async def _both(first: Awaitable[First], second: Awaitable[Second]) -> tuple[First, Second]:
    """Both results; when one fails, the other still ends before its error is raised."""
    tasks = (asyncio.ensure_future(first), asyncio.ensure_future(second))
    await asyncio.wait(tasks)
    return tasks[0].result(), tasks[1].result()
