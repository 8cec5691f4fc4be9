"""The `embedded` engine component: launches `miles_core.engines.embedded` servers through the run's launcher."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Engine, EngineStart
from miles_core.contracts.launchers import Launcher, Process, ProcessSpec

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


class EmbeddedEngine(Engine[EmbeddedEngineConfig]):
    """Embedded servers on this host."""

    Config = EmbeddedEngineConfig
    scores_at_temperature = True

    def __init__(self, config: EmbeddedEngineConfig) -> None:
        super().__init__(config)
        self._processes: list[Process] = []

    async def start(self, launcher: Launcher[Any], start: EngineStart) -> list[str]:
        config = self.config
        urls = []
        for index in range(config.count):
            command = [
                *(sys.executable, "-m", "miles_core.engines.embedded"),
                *("--model", str(start.model_directory), "--dtype", start.dtype, "--device", config.device),
                *("--max-running", str(config.max_running), "--max-total-tokens", str(config.max_total_tokens)),
                *("--threads", str(config.threads), "--port", "0", "--weight-version", str(start.policy_version)),
            ]
            if start.wait_for_weights:
                command.append("--wait-for-weights")
            process = await launcher.launch(
                ProcessSpec(
                    name=f"engine-{index}",
                    command=command,
                    log=start.run_directory / "logs" / f"engine-{index}.log",
                    environment=start.environment,
                )
            )
            self._processes.append(process)
            urls.append(str(process.ready["url"]))
        return urls

    async def stop(self) -> None:
        while self._processes:
            await self._processes.pop().stop()
