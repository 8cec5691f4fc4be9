"""Faults of launchers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

from miles_core.errors import EnvironmentFailure
from miles_core.runs.launcher import LocalLauncher
from planted_faults import scaffolded

Good = scaffolded("launchers")
GOOD = (Good, LocalLauncher)


class NoReadyLine(LocalLauncher):
    """Throws the line away."""

    async def launch(self, spec):
        process = await super().launch(spec)
        process.ready = {}
        return process


class NoEnvironment(LocalLauncher):
    """Forgets variables and threads."""

    async def launch(self, spec):
        return await super().launch(dataclasses.replace(spec, environment={}, threads=0))


class NoLog(LocalLauncher):
    """Says that it failed, not why."""

    async def launch(self, spec):
        try:
            return await super().launch(spec)
        except EnvironmentFailure as error:
            raise EnvironmentFailure(str(error).partition(" The end of")[0]) from error


class Runtime(LocalLauncher):
    """Raises an error of its own."""

    async def launch(self, spec):
        try:
            return await super().launch(spec)
        except EnvironmentFailure as error:
            raise RuntimeError(str(error)) from error


class ForgetsTheLate(LocalLauncher):
    """Gives a late process up, and lets it run. It ends by itself after a while."""

    async def launch(self, spec):
        started = asyncio.create_task(super().launch(dataclasses.replace(spec, ready_timeout=6.0)))
        await asyncio.wait({started}, timeout=spec.ready_timeout)
        if not started.done():
            started.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise EnvironmentFailure("too late")
        return await started


class AnyLine(LocalLauncher):
    """Whatever is printed is a ready line."""

    @staticmethod
    async def _ready(child, spec):
        return {"line": (await child.stdout.readline()).decode()}


class _StopsOnce:
    def __init__(self, process):
        self._process = process
        self.ready = process.ready

    def alive(self):
        return self._process.alive()

    async def stop(self, *, grace=10.0):
        if not self.alive():
            raise RuntimeError("stopped already")
        return await self._process.stop(grace=grace)


class StopsOnce(LocalLauncher):
    """A second stop fails."""

    async def launch(self, spec):
        return _StopsOnce(await super().launch(spec))


class _Killed(_StopsOnce):
    async def stop(self, *, grace=10.0):
        if self.alive():
            os.kill(self._process.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        return -9


class KillsAtOnce(LocalLauncher):
    """Asks nobody to end."""

    async def launch(self, spec):
        return _Killed(await super().launch(spec))


class KillsTheParent(LocalLauncher):
    """Leaves the children of what it kills."""

    async def launch(self, spec):
        return _Killed(await super().launch(spec))


class ClosesNothing(LocalLauncher):
    """Closes without stopping."""

    async def close(self):
        self._processes.clear()


FAULTS = {
    "a_process_is_ready_with_its_line": (NoReadyLine,),
    "its_environment_is_that_of_the_spec": (NoEnvironment,),
    "a_failing_command_shows_its_log": (NoLog, Runtime),
    "a_late_process_is_ended": (ForgetsTheLate,),
    "a_line_that_is_no_json_is_a_failure": (AnyLine,),
    "stop_is_idempotent": (StopsOnce, KillsAtOnce),
    "stop_kills_what_does_not_end_with_its_children": (KillsTheParent,),
    "close_leaves_nothing": (ClosesNothing,),
}
