"""The live panel of `miles train`: a status line under the step lines when the output is a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from miles_core.runs.console import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles_core.config.run import RunConfig
    from miles_core.runs.loop import Run

__all__ = ["status_line", "watch"]


@contextmanager
def watch(config: RunConfig, *, quiet: bool) -> Iterator[Callable[[Run], None] | None]:
    """Show the run while the block lasts: a status line under the step lines on a terminal, nothing when `quiet`."""
    console = Console(highlight=False)
    if quiet:
        QUIET.set()
        try:
            yield None
        finally:
            QUIET.clear()
        return
    if not console.is_terminal:
        yield None
        return
    with console.status("starting") as status:
        stop = threading.Event()

        def observe(run: Run) -> None:
            def refresh() -> None:
                while not stop.wait(0.25):
                    status.update(status_line(run))

            threading.Thread(target=refresh, daemon=True).start()

        try:
            yield observe
        finally:
            stop.set()


def status_line(run: Run) -> str:
    """Phase, progress and load of a run, in one line."""
    recorder, producer = run.recorder, run.producer
    phase = "starting" if recorder is None else recorder.phase
    bar = _bar(run.step / run.config.run.steps)
    text = f"{bar} step {run.step}/{run.config.run.steps}  {phase}"
    if producer is not None:
        scheduler = producer.scheduler
        text += f"  running {scheduler.running_episodes}  buffer {scheduler.depth}"
    if run.last:
        text += f"  reward {run.last['reward']:.3f}"
    return text


def _bar(fraction: float, width: int = 20) -> str:
    filled = round(width * fraction)
    return "━" * filled + "╌" * (width - filled)
