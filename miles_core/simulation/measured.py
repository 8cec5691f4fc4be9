"""What a run measured, as values to draw from: its rollouts give the episodes, its metrics the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from miles_core.data.parquet import read_rollouts
from miles_core.data.trajectory import Turn
from miles_core.runs.metrics import MetricsStore

__all__ = ["measure"]

_OF_TURNS: dict[str, Callable[[Sequence[Turn]], list[float]]] = {
    "turns": lambda turns: [len(turns)],
    "prompt_tokens": lambda turns: [turns[0].start],
    "tokens": lambda turns: [t.stop - t.start for t in turns],
    "tool_seconds": lambda turns: [max(b.started - a.finished, 0.0) for a, b in pairwise(turns)],
    "tool_tokens": lambda turns: [b.start - a.stop for a, b in pairwise(turns)],
}
_OF_STEPS = {"train_seconds": "trainer/train", "publish_seconds": "trainer/publish"}


def measure(run: Path, key: str) -> NDArray[np.float64]:
    """Every value of a scenario's `key` in a run directory. Raises `ValueError` for what a run does not measure, or did
    not. Of trained rollouts: what was dropped is not on disk, so a run that dropped its longest episodes hides them."""
    if key in _OF_STEPS:
        values = _series(run, _OF_STEPS[key])
    elif key in _OF_TURNS:
        files = sorted((run / "rollouts").glob("step-*.parquet"))
        turns = [t.turns for path in files for t in read_rollouts(path) if t.turns]
        values = [value for one in turns for value in _OF_TURNS[key](one)]
    else:
        known = ", ".join(sorted([*_OF_TURNS, *_OF_STEPS]))
        raise ValueError(f"a run does not measure {key}; it measures {known}")
    if not values:
        raise ValueError(f"{run} holds no measurement of {key}: it has no finished step, or is no run directory")
    return np.array(values, np.float64)


def _series(run: Path, name: str) -> list[float]:
    path = run / "metrics.sqlite"
    if not path.exists():
        return []
    store = MetricsStore(path)
    try:
        return [value for step, value in store.series("time", name) if step > 0]
    finally:
        store.close()
