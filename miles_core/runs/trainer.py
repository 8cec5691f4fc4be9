"""The controller's handle of the trainer process. Imports no torch."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from miles_core.contracts.backends import BackendStart, StepReport
from miles_core.contracts.launchers import Launcher, Process, ProcessSpec
from miles_core.contracts.transports import Published
from miles_core.data.group import Batch
from miles_core.errors import EnvironmentFailure
from miles_core.training.worker import KEY_VARIABLE, no_delay

__all__ = ["TrainerClient"]


class TrainerClient:
    """Calls into the trainer process, one at a time, without blocking the event loop."""

    def __init__(self, process: Process, connection: Connection, log: Path) -> None:
        self._process = process
        self._connection = connection
        self._log = log
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    @classmethod
    async def launch(cls, launcher: Launcher[Any], *, log: Path, threads: int) -> TrainerClient:
        """Start the process and connect to it."""
        key = secrets.token_hex(16)
        process = await launcher.launch(
            ProcessSpec(
                name="trainer",
                command=[sys.executable, "-m", "miles_core.training.worker"],
                log=log,
                environment={KEY_VARIABLE: key},
                threads=threads,
            )
        )
        address = (str(process.ready["host"]), int(str(process.ready["port"])))
        connection = await asyncio.to_thread(Client, address, authkey=key.encode())
        no_delay(connection)
        return cls(process, connection, log)

    async def _call(self, method: str, *arguments: object) -> Any:
        loop = asyncio.get_running_loop()
        try:
            outcome, result, _detail = await loop.run_in_executor(self._thread, self._exchange, method, arguments)
        except (EOFError, OSError) as error:
            raise EnvironmentFailure(
                f"the trainer process ended during {method}; its log is {self._log}. Continue with `miles resume`."
            ) from error
        if outcome == "error":
            raise result
        return result

    def _exchange(self, method: str, arguments: tuple[object, ...]) -> Any:
        self._connection.send((method, arguments))
        return self._connection.recv()

    async def start(self, config_tree: Mapping[str, Any], start: BackendStart, run_directory: Path) -> None:
        await self._call("start", config_tree, start, run_directory)

    async def train_step(self, batch: Batch) -> StepReport:
        report: StepReport = await self._call("train_step", batch)
        return report

    async def publish(self, version: int) -> Published:
        published: Published = await self._call("publish", version)
        return published

    async def save(self, directory: Path) -> None:
        await self._call("save", directory)

    async def load(self, directory: Path) -> None:
        await self._call("load", directory)

    async def export(self, directory: Path) -> None:
        await self._call("export", directory)

    async def peak_memory(self) -> int:
        return int(await self._call("peak_memory"))

    async def close(self) -> None:
        """End the process: its connection closes first, so that it releases its buffers."""
        self._connection.close()
        await self._process.stop()
        self._thread.shutdown(wait=False)
