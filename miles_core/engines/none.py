"""No engine: for runs that sample nothing."""

from __future__ import annotations

from typing import Any

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.engines import Engine, EngineStart
from miles_core.contracts.launchers import Launcher

__all__ = ["NoEngine"]


class NoEngine(Engine[ComponentConfig]):
    """Starts nothing; weights are not published."""

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """There is no server to try."""
        return Example(unavailable="it serves nothing")

    async def start(self, launcher: Launcher[Any], start: EngineStart) -> list[str]:
        return []

    async def stop(self) -> None:
        return
