"""The controller's handle of the trainer processes. Imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.backends import BackendStart, StepReport
from miles_core.contracts.launchers import Launcher, Process, ProcessSpec
from miles_core.contracts.transports import Published
from miles_core.data.group import Batch
from miles_core.data.packed import pack_batch, pack_trajectories
from miles_core.data.trajectory import Trajectory
from miles_core.errors import EnvironmentFailure
from miles_core.training.worker import KEY_VARIABLE, no_delay

__all__ = ["TrainerClient"]


class TrainerClient:
    """Calls into the trainer, one at a time, without blocking the event loop. Rank 0 answers for all."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self._ranks = ranks

    @classmethod
    async def launch(cls, launcher: Launcher[Any], *, log: Path, processes: int = 1) -> TrainerClient:
        """Start the processes and connect to each. Several share the cores."""
        threads = 0 if processes == 1 else max(1, (os.cpu_count() or 1) // processes)
        logs = [log, *(log.with_stem(f"{log.stem}-{rank}") for rank in range(1, processes))]
        starts = [
            asyncio.ensure_future(_Rank.launch(launcher, log=own, name=own.stem, threads=threads)) for own in logs
        ]
        return cls(await asyncio.gather(*starts))

    async def _call(self, method: str, *arguments: object) -> Any:
        return await self._call_each(method, [arguments] * len(self._ranks))

    async def _call_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> Any:
        """The answer of rank 0. The first error that any rank answers is raised at once: the others may be waiting for
        that rank."""
        calls = [
            asyncio.ensure_future(rank.call(method, own)) for rank, own in zip(self._ranks, arguments, strict=True)
        ]
        return (await asyncio.gather(*calls))[0]

    async def start(self, config_tree: Mapping[str, Any], start: BackendStart, run_directory: Path) -> None:
        size = len(self._ranks)
        meeting = await self._ranks[0].call("rendezvous", ()) if size > 1 else ""
        starts = [dataclasses.replace(start, rank=rank, world_size=size, rendezvous=meeting) for rank in range(size)]
        await self._call_each("start", [(config_tree, own, run_directory) for own in starts])

    async def train_step(self, batch: Batch) -> StepReport:
        report: StepReport = await self._call("train_step", pack_batch(batch))
        return report

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
        """Log-probs of every token of each trajectory under the current weights."""
        found: list[NDArray[np.float32]] = await self._call("logprobs", pack_trajectories(trajectories))
        return found

    async def publish(self, version: int) -> Published:
        published: Published = await self._call("publish", version)
        return published

    async def transfer(self, published: Published, session: Mapping[str, object]) -> None:
        """The sending end of an in-place transport."""
        await self._call("transfer", published, session)

    async def begin_save(self, directory: Path) -> None:
        """Take a snapshot; it is written while the next calls are answered."""
        await self._call("begin_save", directory)

    async def finish_save(self, *, wait: bool) -> bool:
        """Whether the snapshot is complete on disk; with `wait` it is."""
        return bool(await self._call("finish_save", wait))

    async def load(self, directory: Path) -> None:
        await self._call("load", directory)

    async def export(self, directory: Path) -> None:
        await self._call("export", directory)

    async def begin_export(self, directory: Path) -> None:
        """Take a copy of the weights; it is written while the next calls are answered."""
        await self._call("begin_export", directory)

    async def finish_export(self, *, wait: bool) -> bool:
        """Whether the export is complete on disk; with `wait` it is."""
        return bool(await self._call("finish_export", wait))

    async def peak_memory(self) -> int:
        return int(await self._call("peak_memory"))

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))


class _Rank:
    """One trainer process and the connection to it."""

    def __init__(self, process: Process, connection: Connection, log: Path) -> None:
        self._process = process
        self._connection = connection
        self._log = log
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    @classmethod
    async def launch(cls, launcher: Launcher[Any], *, log: Path, name: str, threads: int) -> _Rank:
        key = secrets.token_hex(16)
        process = await launcher.launch(
            ProcessSpec(
                name=name,
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

    async def call(self, method: str, arguments: tuple[object, ...]) -> Any:
        loop = asyncio.get_running_loop()
        try:
            outcome, result, _detail = await loop.run_in_executor(self._thread, self._exchange, method, arguments)
        except (EOFError, OSError) as error:
            raise EnvironmentFailure(
                f"a trainer process ended during {method}; its log is {self._log}. Continue with `miles resume`."
            ) from error
        if outcome == "error":
            raise result
        return result

    def _exchange(self, method: str, arguments: tuple[object, ...]) -> Any:
        self._connection.send((method, arguments))
        return self._connection.recv()

    async def close(self) -> None:
        """End the process: its connection closes first, so that it releases its buffers."""
        self._connection.close()
        await self._process.stop()
        self._thread.shutdown(wait=False)
