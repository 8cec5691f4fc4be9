"""The `embedded` engine component: launches `miles_core.engines.embedded` servers through the run's launcher."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Engine, EngineStart
from miles_core.contracts.launchers import Launcher, ProcessSpec
from miles_core.engines.launched import LaunchedServer, LaunchedServers

__all__ = ["EmbeddedEngine", "EmbeddedEngineConfig"]


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
        self._launched = LaunchedServers("embedded engine")

    async def start(self, launcher: Launcher[Any], start: EngineStart) -> list[str]:
        servers = [
            LaunchedServer(launcher, start, index, lambda server: self._spec(server, start))
            for index in range(self.config.count)
        ]
        return await self._launched.launch(servers)

    def _spec(self, server: LaunchedServer, start: EngineStart) -> ProcessSpec:
        config = self.config
        command = [
            *(sys.executable, "-m", "miles_core.engines.embedded"),
            *("--model", str(start.model_directory), "--dtype", start.dtype, "--device", config.device),
            *("--max-running", str(config.max_running), "--max-total-tokens", str(config.max_total_tokens)),
            *("--threads", str(config.threads), "--port", str(server.port)),
            *("--weight-version", str(start.policy_version)),
        ]
        if start.wait_for_weights:
            command.append("--wait-for-weights")
        return ProcessSpec(name=server.name, command=command, log=server.log, environment=start.environment)

    async def stop(self) -> None:
        await self._launched.stop()

    def restarts(self) -> AsyncIterator[str]:
        return self._launched.restarts(self.config.restarts)
