"""The `sglang` engine component: SGLang servers that the user runs, or that the run launches from their own virtual
environment. Nothing of SGLang is imported: servers are reached over HTTP, and started by a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.engines import Engine, EngineStart, WeightWitness
from miles_core.contracts.launchers import Launcher, Process, ProcessSpec
from miles_core.engines.client import UNPUBLISHED
from miles_core.engines.sglang_weights import SglangWitness
from miles_core.errors import EngineError, EngineUnavailable, EnvironmentFailure
from miles_core.http import JsonHttp

__all__ = ["SglangConfig", "SglangEngine", "server_command"]

_POLL = 0.5
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
        self._servers: list[_Server] = []
        self._stopping = False

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """A server without a model, which somebody else runs."""
        return Example(settings={"urls": [bench.engine()]})

    async def start(self, launcher: Launcher[Any], start: EngineStart) -> list[str]:
        self._stopping = False
        if self.config.urls:
            urls = [url.rstrip("/") for url in self.config.urls]
            await asyncio.gather(*(_wait_healthy(url, self.config.ready_timeout) for url in urls))
            return urls
        self._servers = [
            _Server(self.config, launcher, start, index=index, port=_free_port())
            for index in range(self.config.replicas)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(server.launch())
        except BaseExceptionGroup as failures:
            await self.stop()
            raise failures.exceptions[0] from None
        return [server.url for server in self._servers]

    async def stop(self) -> None:
        self._stopping = True
        while self._servers:
            await self._servers.pop().stop()

    def witness(self) -> WeightWitness:
        return SglangWitness(on_gpu=self.config.device == "cuda")

    async def restarts(self) -> AsyncIterator[str]:
        """Starts servers that ended again, under their URL. They hold the weights of the model directory."""
        left = self.config.restarts
        while self._servers and not self._stopping:
            await asyncio.sleep(_POLL)
            for server in list(self._servers):
                if server.alive() or self._stopping:
                    continue
                if not left:
                    raise EnvironmentFailure(
                        f"the SGLang server at {server.url} ended, and engine.restarts = {self.config.restarts} allows "
                        f"no further start; its log is {server.log}"
                    )
                left -= 1
                await server.launch()
                yield server.url


class _Server:
    """One launched server. It keeps its port when it is started again."""

    def __init__(
        self, config: SglangConfig, launcher: Launcher[Any], start: EngineStart, *, index: int, port: int
    ) -> None:
        self._config, self._launcher, self._start, self._port = config, launcher, start, port
        self._process: Process | None = None
        self.url = f"http://127.0.0.1:{port}"
        self.name = f"engine-{index}"
        self.log = start.run_directory / "logs" / f"{self.name}.log"

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    async def launch(self) -> None:
        """Raises `EnvironmentFailure` with the end of the server's log."""
        self._process = await self._launcher.launch(
            ProcessSpec(
                name=self.name,
                command=_wrapped(
                    self.url, self._config.ready_timeout, server_command(self._config, self._start, self._port)
                ),
                log=self.log,
                environment={"HF_HUB_OFFLINE": "1", **self._start.environment, **self._config.environment},
                gpus=self._config.gpus if self._config.device == "cuda" else 0,
                ready_timeout=self._config.ready_timeout + _SLACK,
            )
        )

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop(grace=15.0)


def _wrapped(url: str, deadline: float, command: Sequence[str]) -> list[str]:
    wrapper = [sys.executable, "-m", "miles_core.engines.sglang_process", "--url", url, "--deadline", str(deadline)]
    return [*wrapper, "--", *command]


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
