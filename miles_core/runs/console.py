"""The `console` tracker: one plain line a step and one an evaluation point."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.trackers import Tracker

__all__ = ["QUIET", "ConsoleTracker"]

QUIET = threading.Event()
"""Set while a command was asked to print its summary only."""


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
        if not QUIET.is_set():
            self._console.print(text)

    def close(self) -> None:
        """Nothing to flush."""
