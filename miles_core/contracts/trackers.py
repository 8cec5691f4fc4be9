"""Trackers: sinks of metrics."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path

from miles_core.contracts.component import Component, ConfigT

__all__ = ["Tracker"]


class Tracker(Component[ConfigT], abc.ABC):
    """Receives finite numbers by name. Called in the controller, a few times a step, never per token."""

    @abc.abstractmethod
    def open(self, run_directory: Path, resolved_config: Mapping[str, object]) -> None:
        """Called once, before the first `log`. A resumed run opens the same directory again."""

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], *, kind: str) -> None:
        """`kind` is `train`, `rollout`, `eval`, `publish` or `system`. Logging one (step, kind, name) again replaces
        the value, so that a step taken again after a crash is counted once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush. Idempotent."""
