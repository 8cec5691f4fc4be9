"""The `local` launcher: processes on this host, which die with the run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import orjson

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.launchers import Launcher, Process, ProcessSpec
from miles_core.errors import EnvironmentFailure

__all__ = ["LocalLauncher", "LocalProcess"]

_QUIET_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Engines and trainer take turns on the same cores: a thread that spins while it waits takes them from the one that
works. The user's own setting wins."""


class LocalProcess(Process):
    """A child in its own process group. Its stdin is a pipe from this process: it reaches EOF when we are gone."""

    def __init__(self, name: str, child: asyncio.subprocess.Process, ready: Mapping[str, object]) -> None:
        self.name = name
        self.ready = ready
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        return self._child.returncode is None

    async def stop(self, *, grace: float = 10.0) -> int:
        if self._child.stdin is not None:
            self._child.stdin.close()
        if self._child.returncode is None:
            try:
                await asyncio.wait_for(self._child.wait(), grace)
            except TimeoutError:
                _kill_group(self._child.pid)
        return await self._child.wait()


class LocalLauncher(Launcher[ComponentConfig]):
    """Starts commands as children of the controller."""

    def __init__(self, config: ComponentConfig) -> None:
        super().__init__(config)
        self._processes: list[LocalProcess] = []

    async def launch(self, spec: ProcessSpec) -> LocalProcess:
        environment = {**_QUIET_THREADS, **os.environ, **spec.environment}
        if spec.threads:
            environment["OMP_NUM_THREADS"] = str(spec.threads)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            ready = await asyncio.wait_for(self._ready(child, spec), spec.ready_timeout)
        except BaseException as error:
            _kill_group(child.pid)
            await child.wait()
            if isinstance(error, TimeoutError):
                raise EnvironmentFailure(
                    f"process {spec.name!r} was not ready after {spec.ready_timeout:.0f} s.{_tail(spec.log)}"
                ) from error
            raise
        process = LocalProcess(spec.name, child, ready)
        self._processes.append(process)
        return process

    @staticmethod
    async def _ready(child: asyncio.subprocess.Process, spec: ProcessSpec) -> Mapping[str, object]:
        assert child.stdout is not None
        line = await child.stdout.readline()
        if not line:
            status = await child.wait()
            raise EnvironmentFailure(
                f"process {spec.name!r} ended with status {status} before it was ready.{_tail(spec.log)}"
            )
        try:
            ready = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise EnvironmentFailure(
                f"process {spec.name!r} printed {line!r} where its ready line (JSON) was expected.{_tail(spec.log)}"
            ) from error
        if not isinstance(ready, dict):
            raise EnvironmentFailure(f"process {spec.name!r}: its ready line is {line!r}, expected a JSON object")
        return ready

    async def close(self) -> None:
        while self._processes:
            await self._processes.pop().stop()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []
    return f" The end of {log}:\n" + "\n".join(f"    {line}" for line in text) if text else f" {log} is empty."
