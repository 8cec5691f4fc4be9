"""Laws of sandboxes: commands, files, timeouts, and an end that leaves nothing.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from miles_core.contracts.sandboxes import Sandbox
from miles_core.testing.kit import Case, Check
from miles_core.testing.leftovers import has_ended

__all__ = ["CHECKS"]


async def a_command_gives_status_and_output(case: Case) -> None:
    async with _started(case) as sandbox:
        result = await sandbox.exec("echo out; echo err >&2; exit 3", timeout=30)
        assert result.exit_code == 3, f"`exit 3` gave exit code {result.exit_code}"
        assert result.stdout == b"out\n", f"`echo out` gave stdout {result.stdout!r}"
        assert result.stderr == b"err\n", f"`echo err >&2` gave stderr {result.stderr!r}"
        assert not result.timed_out, "a command that ended is said to have timed out"


async def environment_and_directory_are_those_asked_for(case: Case) -> None:
    async with _started(case) as sandbox:
        await sandbox.exec("mkdir -p inner", timeout=30)
        result = await sandbox.exec('echo "$GREETING"; pwd', timeout=30, cwd="inner", env={"GREETING": "a b"})
        lines = result.stdout.decode().splitlines()
        assert lines[:1] == ["a b"], f"env is not what the command sees: {lines}"
        assert lines[-1].endswith("/inner"), f"cwd 'inner' is not where the command ran: {lines}"


async def a_timeout_kills_the_children_too(case: Case) -> None:
    async with _started(case) as sandbox:
        script = "(while true; do echo x >> beats; sleep 0.05; done) & echo before; wait"
        begin = time.monotonic()
        result = await sandbox.exec(script, timeout=0.7)
        assert time.monotonic() - begin < 30, "a command with a timeout of 0.7 s came back after 30 s"
        assert result.timed_out, "a command that was cut short is not said to have timed out"
        assert b"before" in result.stdout, f"the output before the timeout is lost: {result.stdout!r}"
        counts = []
        for _ in range(2):
            counts.append((await sandbox.exec("wc -l < beats", timeout=30)).stdout)
            await asyncio.sleep(0.4)
        assert counts[0] == counts[1], "a child of the command goes on after its timeout"


async def files_go_in_and_come_back(case: Case) -> None:
    directory = case.new_directory()
    content = bytes(range(256))
    (directory / "tree" / "deep").mkdir(parents=True)
    (directory / "tree" / "deep" / "file").write_bytes(content)
    async with _started(case) as sandbox:
        await sandbox.upload(directory / "tree" / "deep" / "file", "put/here.bin")
        await sandbox.upload(directory / "tree", "copied")
        await sandbox.download("put/here.bin", directory / "back.bin")
        await sandbox.download("copied", directory / "back")
        assert (directory / "back.bin").read_bytes() == content, "a file does not come back as it went in"
        copied = directory / "back" / "deep" / "file"
        assert copied.is_file(), "a directory does not come back with the files in it"
        assert copied.read_bytes() == content, "a file of a directory does not come back as it went in"
        size = await sandbox.exec("wc -c < put/here.bin", timeout=30)
        assert size.stdout.strip() == b"256", "commands do not see the file where it was put"


async def stop_is_idempotent(case: Case) -> None:
    unstarted, sandbox = case.create(), case.create()
    try:
        await unstarted.stop()
        await sandbox.start()
        await sandbox.stop()
        await sandbox.stop()
    except Exception as error:
        raise AssertionError(
            f"stop() raises before the start, or when it is called again: {type(error).__name__}: {error}"
        ) from error


async def nothing_is_left_running(case: Case) -> None:
    sandbox = case.create()
    await sandbox.start()
    mark = f"{int(uuid.uuid4()) % 10**9 + 10**6}.5"
    await sandbox.exec(f"sleep {mark} >/dev/null 2>&1 &", timeout=30)
    await sandbox.stop()
    assert await has_ended(f"sleep\0{mark}"), "a process that a command left behind runs on after stop()"


async def cancellation_ends_the_command(case: Case) -> None:
    async with _started(case) as sandbox:
        mark = f"{int(uuid.uuid4()) % 10**9 + 10**6}.5"
        task = asyncio.create_task(sandbox.exec(f"sleep {mark}", timeout=3600))
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled(), "exec() swallows its cancellation"
        assert await has_ended(f"sleep\0{mark}"), "the command runs on after its call was cancelled"


CHECKS: tuple[Check, ...] = (
    a_command_gives_status_and_output,
    environment_and_directory_are_those_asked_for,
    a_timeout_kills_the_children_too,
    files_go_in_and_come_back,
    stop_is_idempotent,
    nothing_is_left_running,
    cancellation_ends_the_command,
)


@contextlib.asynccontextmanager
async def _started(case: Case) -> AsyncIterator[Sandbox[Any]]:
    sandbox: Sandbox[Any] = case.create()
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()
