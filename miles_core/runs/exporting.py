"""Export of a checkpoint of a run as a Hugging Face directory."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from miles_core.contracts.backends import BackendStart
from miles_core.errors import RunDirectoryError, nearest
from miles_core.models.reference import resolve_model
from miles_core.plugins import PluginManager
from miles_core.runs.atomic import atomic_directory
from miles_core.runs.components import build_components
from miles_core.runs.directory import RunDirectory
from miles_core.runs.trainer import TrainerClient

__all__ = ["export_run"]


def export_run(run: Path, out: Path, *, step: int | None = None) -> tuple[Path, int]:
    """Load the checkpoint of `step` (None: the newest) in a trainer process and export it to `out`, which must not
    exist.

    Returns the directory and the step. Raises `RunDirectoryError` without a checkpoint.
    """
    directory = RunDirectory.open(run, write=False)
    checkpoints = dict(directory.checkpoints())
    if not checkpoints:
        raise RunDirectoryError(f"{run} has no checkpoint yet; set run.checkpoint_every, or let the run finish")
    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        raise RunDirectoryError(
            f"{run} has no checkpoint of step {chosen}; {nearest(str(chosen), [*map(str, checkpoints)])}"
        )
    if out.exists():
        raise RunDirectoryError(f"{out} exists; choose another directory, an export never overwrites")
    asyncio.run(_export(directory, checkpoints[chosen], out))
    return out, chosen


async def _export(directory: RunDirectory, checkpoint: Path, out: Path) -> None:
    loaded = directory.loaded_config()
    config = loaded.config
    plugins = PluginManager.discover(enable=config.plugins.enable)
    launcher = build_components(config, plugins).launcher
    with tempfile.TemporaryDirectory() as scratch:
        trainer = await TrainerClient.launch(launcher, log=Path(scratch) / "trainer.log")
        try:
            start = BackendStart(
                model_directory=resolve_model(config.model.path).directory,
                dtype=config.model.dtype,
                seed=config.run.seed,
                temperature=config.sampling.temperature,
                total_steps=config.run.steps,
            )
            await trainer.start(loaded.resolved(), start, directory.path)
            await trainer.load(checkpoint / "backend")
            with atomic_directory(out.absolute()) as temporary:
                await trainer.export(temporary)
        finally:
            await trainer.close()
            await launcher.close()
