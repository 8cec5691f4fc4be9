"""Laws of launchers: ready lines, errors that show the log, and nothing left running.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

from miles_core.contracts.launchers import Launcher, ProcessSpec
from miles_core.errors import EnvironmentFailure
from miles_core.testing.kit import Case, Check
from miles_core.testing.leftovers import has_ended, processes_with

__all__ = ["CHECKS"]

READY = "import sys; print('{\"port\": 7}', flush=True); sys.stdin.read()"


async def a_process_is_ready_with_its_line(case: Case) -> None:
    async with _launcher(case) as launcher:
        process = await launcher.launch(_spec(case, READY))
        assert dict(process.ready) == {"port": 7}, f"the ready line {{'port': 7}} became {process.ready}"
        assert process.alive(), "a process that waits is said to have ended"


async def its_environment_is_that_of_the_spec(case: Case) -> None:
    code = (
        "import json, os, sys; "
        "print(json.dumps({k: os.environ.get(k) for k in ('GREETING', 'OMP_NUM_THREADS')}), flush=True); "
        "sys.stdin.read()"
    )
    async with _launcher(case) as launcher:
        process = await launcher.launch(_spec(case, code, environment={"GREETING": "a b"}, threads=3))
        expected = {"GREETING": "a b", "OMP_NUM_THREADS": "3"}
        assert dict(process.ready) == expected, f"the process sees {dict(process.ready)}, expected {expected}"


async def a_failing_command_shows_its_log(case: Case) -> None:
    async with _launcher(case) as launcher:
        code = "import sys; print('the reason why', file=sys.stderr); sys.exit(3)"
        error = await _failure(launcher, _spec(case, code))
        assert "the reason why" in str(error), f"the error does not show the end of the process's log: {error}"


async def a_late_process_is_ended(case: Case) -> None:
    async with _launcher(case) as launcher:
        mark = uuid.uuid4().hex
        await _failure(launcher, _spec(case, f"import time; time.sleep(600)  # {mark}", ready_timeout=1.0))
        assert await has_ended(mark), "a process that was not ready in time runs on"


async def a_line_that_is_no_json_is_a_failure(case: Case) -> None:
    async with _launcher(case) as launcher:
        await _failure(launcher, _spec(case, "import sys; print('hello', flush=True); sys.stdin.read()"))


async def stop_is_idempotent(case: Case) -> None:
    async with _launcher(case) as launcher:
        process = await launcher.launch(_spec(case, READY))
        statuses = [await process.stop(grace=10.0) for _ in range(2)]
        assert statuses == [0, 0], f"stop(), twice, of a process that ends by itself gave {statuses}, expected 0 and 0"
        assert not process.alive(), "a stopped process is said to be alive"


async def stop_kills_what_does_not_end_with_its_children(case: Case) -> None:
    mark = uuid.uuid4().hex
    child = f"import time; time.sleep(600)  # {mark}"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print('{}', flush=True); time.sleep(600)"
    )
    async with _launcher(case) as launcher:
        process = await launcher.launch(_spec(case, code))
        await process.stop(grace=0.2)
        assert await has_ended(mark), "a process that does not end by itself, or its child, runs on after stop()"


async def close_leaves_nothing(case: Case) -> None:
    mark = uuid.uuid4().hex
    launcher = case.create()
    process = await launcher.launch(_spec(case, f"{READY}  # {mark}"))
    await launcher.launch(_spec(case, READY))
    await launcher.close()
    assert not process.alive(), "a process is alive after close()"
    assert await has_ended(mark), f"processes {processes_with(mark)} run on after close()"


CHECKS: tuple[Check, ...] = (
    a_process_is_ready_with_its_line,
    its_environment_is_that_of_the_spec,
    a_failing_command_shows_its_log,
    a_late_process_is_ended,
    a_line_that_is_no_json_is_a_failure,
    stop_is_idempotent,
    stop_kills_what_does_not_end_with_its_children,
    close_leaves_nothing,
)


@contextlib.asynccontextmanager
async def _launcher(case: Case) -> AsyncIterator[Launcher[Any]]:
    launcher: Launcher[Any] = case.create()
    try:
        yield launcher
    finally:
        await launcher.close()


def _spec(case: Case, code: str, **changes: Any) -> ProcessSpec:
    fields: dict[str, Any] = {"log": case.new_directory() / "child.log", "ready_timeout": 60.0, **changes}
    return ProcessSpec(name="child", command=[sys.executable, "-c", code], **fields)


async def _failure(launcher: Launcher[Any], spec: ProcessSpec) -> EnvironmentFailure:
    """The failure that launching `spec` raises."""
    try:
        async with asyncio.timeout(60):
            process = await launcher.launch(spec)
    except EnvironmentFailure as error:
        return error
    except Exception as error:
        raise AssertionError(
            f"a process that does not come up raises {type(error).__name__}: {error}; expected EnvironmentFailure"
        ) from error
    raise AssertionError(f"a process that does not come up is launched, with the ready line {process.ready}")
