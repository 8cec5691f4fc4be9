"""The live panel of `miles train`: one line a step, and a status line when the output is a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.trackers import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles_core.config.run import RunConfig
    from miles_core.runs.loop import Run

__all__ = ["ConsoleTracker", "watch"]

_quiet = threading.Event()


class ConsoleTracker(Tracker[ComponentConfig]):
    """Prints one plain line a step and one an evaluation point."""

    def __init__(self, config: ComponentConfig) -> None:
        super().__init__(config)
        self._console = Console(highlight=False, soft_wrap=True)
        self._rollout: Mapping[str, float] = {}
        self._steps = 0
        self._last = time.monotonic()

    def open(self, run_directory: Path, resolved_config: Mapping[str, object]) -> None:
        run: Any = resolved_config["run"]
        self._steps = int(run["steps"])
        self._say(f"run {run_directory}")

    def log(self, step: int, metrics: Mapping[str, float], *, kind: str) -> None:
        if kind == "rollout":
            self._rollout = metrics
        elif kind == "train" and {"loss", "grad_norm"} <= metrics.keys():
            now = time.monotonic()
            tokens = self._rollout.get("tokens/total", 0.0) / max(now - self._last, 1e-9)
            drops = sum(v for k, v in self._rollout.items() if k.startswith("dropped/"))
            self._say(
                f"step {step}/{self._steps}  reward {self._rollout.get('reward/mean', 0.0):.3f}  "
                f"loss {metrics['loss']:+.4f}  grad norm {metrics['grad_norm']:.3f}  "
                f"{tokens:.0f} tokens/s  {now - self._last:.1f} s" + (f"  dropped {drops:.0f}" if drops else "")
            )
            self._last = now
        elif kind == "eval":
            for name, value in metrics.items():
                if name.endswith("/mean"):
                    prefix = name.removesuffix("/mean")
                    error = metrics.get(f"{prefix}/standard_error")
                    margin = "" if error is None else f" ± {error:.3f}"
                    self._say(f"version {step}  {prefix.replace('/', ', ')}: {value:.3f}{margin}")
            self._last = time.monotonic()

    def _say(self, text: str) -> None:
        if not _quiet.is_set():
            self._console.print(text)

    def close(self) -> None:
        """Nothing to flush."""


@contextmanager
def watch(config: RunConfig, *, quiet: bool) -> Iterator[Callable[[Run], None] | None]:
    """Show the run while the block lasts: a status line under the step lines on a terminal, nothing when `quiet`."""
    console = Console(highlight=False)
    if quiet:
        _quiet.set()
        try:
            yield None
        finally:
            _quiet.clear()
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
