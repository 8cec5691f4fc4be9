"""What there is in a directory of runs."""

from __future__ import annotations

import dataclasses
import fcntl
from pathlib import Path

from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore

__all__ = ["RunRow", "describe_runs"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run in words. `state` is `running`, `finished` or `stopped`."""

    name: str
    step: int
    steps: int
    reward: str
    state: str
    checkpoint: str


def describe_runs(directory: Path) -> list[RunRow]:
    """The runs directly below `directory`, by name."""
    paths = sorted(p.parent for p in directory.glob("*/config.json"))
    return [_describe(RunDirectory.open(path, write=False)) for path in paths]


def _describe(run: RunDirectory) -> RunRow:
    config = run.loaded_config().config
    rewards: list[tuple[int, float]] = []
    if run.metrics_file.exists():
        store = MetricsStore(run.metrics_file)
        rewards = store.series("rollout", "reward/mean")
        store.close()
    step = rewards[-1][0] if rewards else 0
    checkpoints = run.checkpoints()
    if _locked(run.path / "run.lock"):
        state = "running"
    else:
        state = "finished" if checkpoints and checkpoints[-1][0] == config.run.steps else "stopped"
    return RunRow(
        name=run.path.name,
        step=step,
        steps=config.run.steps,
        reward=f"{rewards[-1][1]:.3f}" if rewards else "",
        state=state,
        checkpoint=str(checkpoints[-1][0]) if checkpoints else "none",
    )


def _locked(path: Path) -> bool:
    """Whether a process holds the run for writing."""
    if not path.exists():
        return False
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
