"""The `embedded` engine component: launches `miles_core.engines.embedded` servers through the run's launcher."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Engine, EngineStart
from miles_core.contracts.launchers import Launcher, Process, ProcessSpec
from miles_core.errors import EnvironmentFailure

__all__ = ["EmbeddedEngine", "EmbeddedEngineConfig"]

_POLL = 0.1


class EmbeddedEngineConfig(ComponentConfig):
    """The embedded engine: a transformers model in its own process, with SGLang's protocol."""

    count: int = Field(default=1, ge=1)
    """Engine processes."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of each; 0 shares the machine's cores among them."""

    max_running: int = Field(default=64, ge=1)
    """Most sequences decoded together."""

    max_total_tokens: int = Field(default=16384, ge=256)
    """Tokens that the key-value cache holds."""

    device: str = "cpu"
    """`cpu`, or a CUDA device."""

    restarts: int = Field(default=3, ge=0)
    """How often an engine that ended is started again, over the whole run."""


class EmbeddedEngine(Engine[EmbeddedEngineConfig]):
    """Embedded servers on this host. One that ends is started again, under its URL."""

    Config = EmbeddedEngineConfig
    scores_at_temperature = True

    def __init__(self, config: EmbeddedEngineConfig) -> None:
        super().__init__(config)
        self._servers: list[_Server] = []
        self._stopping = False

    async def start(self, launcher: Launcher[Any], start: EngineStart) -> list[str]:
        self._stopping = False
        for index in range(self.config.count):
            server = _Server(self.config, launcher, start, index)
            await server.launch()
            self._servers.append(server)
        return [server.url for server in self._servers]

    async def stop(self) -> None:
        self._stopping = True
        while self._servers:
            await self._servers.pop().stop()

    async def restarts(self) -> AsyncIterator[str]:
        """See `Engine.restarts`. Raises `EnvironmentFailure` when one may not, or cannot, be started again."""
        left = self.config.restarts
        while self._servers and not self._stopping:
            await asyncio.sleep(_POLL)
            for server in list(self._servers):
                if server.alive() or self._stopping:
                    continue
                if not left:
                    raise EnvironmentFailure(
                        f"the embedded engine at {server.url} ended, and engine.restarts = {self.config.restarts} "
                        f"allows no further start; its log is {server.log}. Continue with `miles resume`."
                    )
                left -= 1
                await server.launch()
                yield server.url


class _Server:
    """One engine process. It keeps its port when it is started again."""

    def __init__(self, config: EmbeddedEngineConfig, launcher: Launcher[Any], start: EngineStart, index: int) -> None:
        self._config, self._launcher, self._start = config, launcher, start
        self._process: Process | None = None
        self.name = f"engine-{index}"
        self.log = start.run_directory / "logs" / f"{self.name}.log"
        self.url = ""

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    async def launch(self) -> None:
        """Raises `EnvironmentFailure` with the end of the process's log."""
        config, start = self._config, self._start
        command = [
            *(sys.executable, "-m", "miles_core.engines.embedded"),
            *("--model", str(start.model_directory), "--dtype", start.dtype, "--device", config.device),
            *("--max-running", str(config.max_running), "--max-total-tokens", str(config.max_total_tokens)),
            *("--threads", str(config.threads), "--port", self.url.rpartition(":")[2] or "0"),
            *("--weight-version", str(start.policy_version)),
        ]
        if start.wait_for_weights:
            command.append("--wait-for-weights")
        self._process = await self._launcher.launch(
            ProcessSpec(name=self.name, command=command, log=self.log, environment=start.environment)
        )
        self.url = str(self._process.ready["url"])

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
