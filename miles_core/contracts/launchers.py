"""Launchers: where a run's processes run."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_core.contracts.component import Component, ConfigT

__all__ = ["Launcher", "Process", "ProcessSpec"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """A command to run. It prints one JSON line on stdout when ready; its stderr goes to `log`.

    `gpus` is how many devices it needs, `threads` how many CPU threads (OMP_NUM_THREADS).
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: int = 0
    threads: int = 0
    ready_timeout: float = 300.0


class Process(abc.ABC):
    """A launched process. It dies with the run: its stdin reaches EOF when the controller is gone."""

    ready: Mapping[str, object]
    """The JSON object that the process printed when it was ready."""

    @abc.abstractmethod
    def alive(self) -> bool: ...

    @abc.abstractmethod
    async def stop(self, *, grace: float = 10.0) -> int:
        """Ask it to end, kill it with its children after `grace` seconds; its exit status. Idempotent."""


class Launcher(Component[ConfigT], abc.ABC):
    """Starts processes on this or other hosts."""

    @abc.abstractmethod
    async def launch(self, spec: ProcessSpec) -> Process:
        """Start it and wait for its ready line. Raises `EnvironmentFailure` with the log's tail when it dies first
        or passes `ready_timeout`; nothing is left running then."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop everything it launched, in reverse order."""
