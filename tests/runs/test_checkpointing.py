"""A checkpoint grows beside the next steps, and is not there before it is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_core.contracts.events import CheckpointSaved
from miles_core.errors import RunDirectoryError
from miles_core.runs.checkpointing import Checkpoints
from miles_core.runs.directory import RunDirectory


class SlowTrainer:
    """Writes as long as `done` is False."""

    def __init__(self) -> None:
        self.done = False
        self.failure: Exception | None = None

    async def begin_save(self, directory: Path) -> None:
        directory.mkdir()
        self.file = directory / "shard"
        self.file.write_text("half")

    async def finish_save(self, *, wait: bool) -> bool:
        if self.failure is not None:
            raise self.failure
        if wait or self.done:
            self.file.write_text("whole")
            self.done = True
        return self.done


@pytest.fixture
def setup(tmp_path: Path) -> tuple[Any, ...]:
    directory, trainer, saved = RunDirectory(tmp_path), SlowTrainer(), list[CheckpointSaved]()
    checkpoints = Checkpoints(directory, trainer, keep=1, on_saved=saved.append)  # type: ignore[arg-type]
    return directory, trainer, saved, checkpoints


async def test_it_is_named_when_it_is_complete(setup: tuple[Any, ...]) -> None:
    directory, trainer, saved, checkpoints = setup
    await checkpoints.begin(1)
    await checkpoints.finish(wait=False)
    assert directory.checkpoints() == []
    assert saved == []
    trainer.done = True
    await checkpoints.finish(wait=False)
    ((step, path),) = directory.checkpoints()
    assert (step, (path / "backend" / "shard").read_text()) == (1, "whole")
    assert [s.step for s in saved] == [1]


async def test_a_crash_in_the_middle_leaves_the_one_before(setup: tuple[Any, ...]) -> None:
    directory, _, _, checkpoints = setup
    await checkpoints.begin(1)
    await checkpoints.begin(2)  # waits for the first
    assert [step for step, _ in directory.checkpoints()] == [1]  # here the process dies
    directory.remove_temporary()  # and a new one starts
    assert [p.name for p in directory.checkpoints()[0][1].parent.iterdir()] == [directory.checkpoint(1).name]


async def test_what_writing_met_is_raised_and_the_one_before_stays(setup: tuple[Any, ...]) -> None:
    directory, trainer, saved, checkpoints = setup
    await checkpoints.begin(1)
    await checkpoints.finish()
    await checkpoints.begin(2)
    trainer.failure = OSError("no space left on device")
    with pytest.raises(RunDirectoryError, match=r"the checkpoint of step 2 could not be written.*no space"):
        await checkpoints.finish()
    assert [step for step, _ in directory.checkpoints()] == [1]
    assert [s.step for s in saved] == [1]
