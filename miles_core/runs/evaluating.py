"""Evaluation inside a run: which versions are measured, and what became of it."""

from __future__ import annotations

import asyncio
import contextlib

from miles_core.config.sections import EvaluationSection
from miles_core.contracts.events import EvaluationPoint, EvaluationRecord
from miles_core.data.parquet import write_rollouts
from miles_core.errors import MilesError
from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore
from miles_core.runs.placements import Placement
from miles_core.runs.recording import Recorder

__all__ = ["Evaluator"]


class Evaluator:
    """Measures the versions that are due, files each point under the version it measured, and records what was not.

    Beside training, at most one evaluation runs; one that fails is refused, with the reason, and the run goes on. The
    last version always has its points: `finish` measures it once more if it has to, and raises what that meets.
    """

    def __init__(
        self,
        section: EvaluationSection,
        placement: Placement,
        directory: RunDirectory,
        record: Recorder,
        store: MetricsStore,
        *,
        last: int,
    ) -> None:
        self._section = section
        self._placement = placement
        self._directory = directory
        self._record = record
        self._store = store
        self._last = last
        self._running: asyncio.Task[None] | None = None
        self._version = 0
        done = [r for r in store.evaluations() if not r.dataset and r.outcome == "measured"]
        self._measured = {r.version for r in done}
        self.points: list[EvaluationPoint] = []
        """Points of this process, in the order in which they came."""

    def _due(self, version: int) -> bool:
        if not (self._section.datasets or self._section.callable):
            return False
        if version == 0:
            return self._section.at_start
        return version == self._last or bool(self._section.every and version % self._section.every == 0)

    async def started(self, version: int) -> None:
        """The run starts, or goes on, at this version. What it had to measure here before it was interrupted is
        measured now. On shared engines it is measured again: what they did before a step is the same in every run."""
        again = not self._placement.beside and version < self._last
        if self._due(version) and (again or version not in self._measured):
            await self._evaluate(version)

    async def stepped(self, version: int) -> None:
        """The trainer and the rollout engines hold this version now."""
        if self._due(version):
            await self._evaluate(version)

    async def finish(self) -> None:
        """No step follows: wait for what runs. Raises `MilesError` when the last version cannot be measured."""
        await self._wait()
        if self._due(self._last) and self._last not in self._measured:
            await self._placement.hand_over(self._last)
            await self._measure(self._last)

    async def close(self) -> None:
        """Whatever still runs ends without a point."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        await self._placement.close()

    async def _evaluate(self, version: int) -> None:
        if not self._placement.beside:
            await self._measure(version)
            return
        if self._running is not None and not self._running.done():
            if self._section.overflow == "skip" and version != self._last:
                self._note(version, "skipped", f"version {self._version} was still being measured")
                return
            with self._record.span("trainer", "wait for evaluation", version):
                await self._wait()
        await self._wait()
        problem: MilesError | None = None
        with self._record.span("trainer", "hand over", version):
            try:
                await self._placement.hand_over(version)
            except MilesError as error:
                problem = error
        self._version = version
        self._running = asyncio.create_task(self._beside(version, problem))

    async def _wait(self) -> None:
        """Until nothing runs beside training. Raises what nobody expected there."""
        if self._running is not None:
            running, self._running = self._running, None
            await running

    async def _beside(self, version: int, problem: MilesError | None) -> None:
        try:
            if problem is not None:
                raise problem
            async with asyncio.timeout(self._section.timeout):
                await self._measure(version)
        except (MilesError, TimeoutError) as error:
            late = f"it took more than [evaluation] timeout = {self._section.timeout:g} s"
            reason = str(error) if isinstance(error, MilesError) else late
            self._note(version, "refused", reason)
            try:
                await self._placement.repair()
            except MilesError as failure:
                self._note(version, "refused", f"{reason}; and then: {failure}")

    async def _measure(self, version: int) -> None:
        self._note(version, "running")
        lane = "evaluation" if self._placement.beside else "rollout"
        try:
            with self._record.span(lane, "evaluate", version, shown=not self._placement.beside):
                async with contextlib.aclosing(self._placement.measure(version)) as found:
                    async for measured in found:
                        point = measured.point
                        if measured.episodes:
                            await asyncio.to_thread(
                                write_rollouts,
                                self._directory.evaluation_file(point.dataset, point.mode, version),
                                [t for e in measured.episodes for t in e.trajectories],
                                step=version,
                                policy_version=version,
                            )
                        self.points.append(point)
                        self._record.point(point)
                        self._note(version, "measured", dataset=point.dataset, mode=point.mode)
        except MilesError as error:
            self._note(version, "refused", str(error))
            raise
        self._measured.add(version)
        self._note(version, "measured")

    def _note(self, version: int, outcome: str, reason: str = "", *, dataset: str = "", mode: str = "") -> None:
        self._store.evaluation(
            EvaluationRecord(
                version=version,
                dataset=dataset,
                mode=mode,
                placement=self._section.placement,
                outcome=outcome,
                reason=reason,
            )
        )
