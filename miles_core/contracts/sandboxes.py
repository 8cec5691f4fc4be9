"""Sandboxes: where an agent's commands run."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path

from miles_core.contracts.component import Component, ConfigT

__all__ = ["ExecResult", "Sandbox"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """A finished command. `timed_out` commands were killed with their children; output so far is kept."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


class Sandbox(Component[ConfigT], abc.ABC):
    """One isolated place. `stop` is idempotent, and leaves no process, port or file behind."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Bring it up. Raises `EnvironmentFailure` when it cannot be had."""

    @abc.abstractmethod
    async def exec(
        self, command: str, *, timeout: float, cwd: str | None = None, env: dict[str, str] | None = None
    ) -> ExecResult:
        """Run a shell command; `timeout` in seconds."""

    @abc.abstractmethod
    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or directory in; `target` is a path inside."""

    @abc.abstractmethod
    async def download(self, source: str, target: Path) -> None:
        """Copy a file or directory out."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End it. Safe to call twice, and after a failed start."""
