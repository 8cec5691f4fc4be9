"""Checkpoints of a run, written beside its next step, and never seen before they are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from miles_core.contracts.events import CheckpointSaved
from miles_core.runs.atomic import begin_directory, complete_directory, writing
from miles_core.runs.directory import RunDirectory
from miles_core.runs.trainer import TrainerClient

__all__ = ["Checkpoints"]


class Checkpoints:
    """At most one is being written. It grows under a temporary name, which a later start of the run removes. When all
    of it is on disk it gets its own name, and only then are older ones removed: a crash before that leaves the
    checkpoint before as it was."""

    def __init__(
        self,
        directory: RunDirectory,
        trainer: TrainerClient,
        *,
        keep: int,
        on_saved: Callable[[CheckpointSaved], object],
    ) -> None:
        self._directory = directory
        self._trainer = trainer
        self._keep = keep
        self._on_saved = on_saved
        self._growing: tuple[int, Path] | None = None

    async def begin(self, step: int) -> None:
        """Take a snapshot of the trainer as it is after `step`, and let it be written."""
        await self.finish()
        path = self._directory.checkpoint(step)
        with writing(f"the checkpoint of step {step}", path):
            temporary = begin_directory(path)
            await self._trainer.begin_save(temporary / "backend")
        self._growing = (step, temporary)

    async def finish(self, *, wait: bool = True) -> None:
        """Give what is written its name; without `wait`, only when nothing is left to write."""
        if self._growing is None:
            return
        step, temporary = self._growing
        path = self._directory.checkpoint(step)
        with writing(f"the checkpoint of step {step}", path):
            if not await self._trainer.finish_save(wait=wait):
                return
            self._growing = None
            await asyncio.to_thread(complete_directory, temporary, path)
        self._directory.prune_checkpoints(self._keep)
        self._on_saved(CheckpointSaved(step=step, version=step, directory=path))
