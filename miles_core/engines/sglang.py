"""The `sglang` engine component: SGLang servers that the user runs, or that the run launches from their own virtual
environment. Nothing of SGLang is imported: servers are reached over HTTP, and started by a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field, model_validator

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.engines import Engine, EngineStart, WeightWitness
from miles_core.contracts.launchers import Launcher, ProcessSpec
from miles_core.engines.launched import LaunchedServer, LaunchedServers
from miles_core.engines.sglang_weights import SglangWitness
from miles_core.engines.wire import UNPUBLISHED
from miles_core.errors import EngineError, EngineUnavailable
from miles_core.http import JsonHttp

__all__ = ["SglangConfig", "SglangEngine", "server_command"]

_SLACK = 30.0
"""Seconds beyond the deadline that the launcher waits, so that the server's own process can say what went wrong."""


class SglangConfig(ComponentConfig):
    """SGLang servers: `urls` of those that the user runs, or what launches them."""

    urls: tuple[str, ...] = ()
    """Base URLs of running servers. They are used, and never stopped."""

    python: str = ""
    """Interpreter of a virtual environment with SGLang; launches `python -m sglang.launch_server`."""

    command: tuple[str, ...] = ()
    """Launch this instead, with the same arguments behind it."""

    replicas: int = Field(default=1, ge=1)
    """Servers to launch."""

    arguments: tuple[str, ...] = ()
    """More arguments of each server, as `--mem-fraction-static`, `0.8`."""

    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of each server."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Where the servers compute; it decides how they hash their weights."""

    gpus: int = Field(default=1, ge=0)
    """GPUs of each launched server; none on a CPU."""

    ready_timeout: float = Field(default=600.0, gt=0)
    """Seconds until a server must answer `/health`."""

    restarts: int = Field(default=3, ge=0)
    """How often a launched server that ended is started again, over the whole run."""

    @model_validator(mode="after")
    def _one_way(self) -> SglangConfig:
        ways = [name for name in ("urls", "python", "command") if getattr(self, name)]
        if len(ways) != 1:
            given = " and ".join(ways) or "none of them"
            raise ValueError(
                f"exactly one of urls, python and command says where the servers are, but {given} is set; set urls to "
                "servers that run, or python to the interpreter of a virtual environment with SGLang"
            )
        return self


def server_command(config: SglangConfig, start: EngineStart, port: int) -> list[str]:
    """The command line of one server."""
    launch = list(config.command) or [config.python, "-m", "sglang.launch_server"]
    command = [
        *launch,
        *("--model-path", str(start.model_directory), "--dtype", start.dtype, "--device", config.device),
        *("--host", "127.0.0.1", "--port", str(port), "--weight-version", _version(start)),
        "--skip-server-warmup",
    ]
    if config.device == "cpu":
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--sleep-on-idle"]
    return [*command, *config.arguments]


def _version(start: EngineStart) -> str:
    """What the server reports before anything was published to it. Tokens under a version that is no number are refused
    by the client, so that a server that was started again behind our back never adds a sample."""
    return UNPUBLISHED if start.wait_for_weights else str(start.policy_version)


class SglangEngine(Engine[SglangConfig]):
    """SGLang over HTTP."""

    Config = SglangConfig

    def __init__(self, config: SglangConfig) -> None:
        super().__init__(config)
        self._launched = LaunchedServers("SGLang server")

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """A server without a model, which somebody else runs."""
        return Example(settings={"urls": [bench.engine()]})

    async def start(self, launcher: Launcher[Any], start: EngineStart) -> list[str]:
        if self.config.urls:
            urls = [url.rstrip("/") for url in self.config.urls]
            await asyncio.gather(*(_wait_healthy(url, self.config.ready_timeout) for url in urls))
            return urls
        servers = [
            LaunchedServer(launcher, start, index, lambda server: self._spec(server, start))
            for index in range(self.config.replicas)
        ]
        return await self._launched.launch(servers)

    def _spec(self, server: LaunchedServer, start: EngineStart) -> ProcessSpec:
        config, port = self.config, server.port or _free_port()
        wrapper = [sys.executable, "-m", "miles_core.engines.sglang_process"]
        options = ["--url", f"http://127.0.0.1:{port}", "--deadline", str(config.ready_timeout)]
        return ProcessSpec(
            name=server.name,
            command=[*wrapper, *options, "--", *server_command(config, start, port)],
            log=server.log,
            environment={"HF_HUB_OFFLINE": "1", **start.environment, **config.environment},
            gpus=config.gpus if config.device == "cuda" else 0,
            ready_timeout=config.ready_timeout + _SLACK,
        )

    async def stop(self) -> None:
        await self._launched.stop()

    def witness(self) -> WeightWitness:
        return SglangWitness(on_gpu=self.config.device == "cuda")

    def restarts(self) -> AsyncIterator[str]:
        """Servers that were started again hold the weights of the model directory."""
        return self._launched.restarts(self.config.restarts)


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


async def _wait_healthy(url: str, deadline: float) -> None:
    http = JsonHttp(deadline=deadline)
    try:
        await http.call("GET", f"{url}/health")
    except EngineUnavailable as error:
        raise EngineError(
            f"engine.urls: {url} does not answer /health. Start the server, or correct the URL. {error}"
        ) from error
    finally:
        await http.close()
