"""Faults of sandboxes."""

from __future__ import annotations

import asyncio
import dataclasses

from miles_core.contracts.sandboxes import ExecResult
from miles_core.rollout.sandboxes.subprocess import SubprocessSandbox
from planted_faults import scaffolded

Good = scaffolded("sandboxes")
GOOD = (Good, SubprocessSandbox)


class NoStatus(SubprocessSandbox):
    """Everything works."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        result = await super().exec(command, timeout=timeout, cwd=cwd, env=env)
        return dataclasses.replace(result, exit_code=0)


class OneStream(SubprocessSandbox):
    """Errors are output."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        result = await super().exec(command, timeout=timeout, cwd=cwd, env=env)
        return dataclasses.replace(result, stdout=result.stdout + result.stderr, stderr=b"")


class NoEnvironment(SubprocessSandbox):
    """Forgets the variables."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        return await super().exec(command, timeout=timeout, cwd=cwd)


class NoDirectory(SubprocessSandbox):
    """Runs where it likes."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        return await super().exec(command, timeout=timeout, env=env)


class _Plain(SubprocessSandbox):
    """A shell without process groups or marks: what a first version looks like."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        shell = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            command,
            cwd=self._inside(cwd or "."),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        timed_out = False
        try:
            await asyncio.wait_for(shell.wait(), timeout)
        except TimeoutError:
            timed_out = True
            shell.kill()
            await shell.wait()
        assert shell.stdout is not None
        output = b"before\n" if timed_out else await shell.stdout.read()
        return ExecResult(exit_code=shell.returncode or 0, stdout=output, stderr=b"", timed_out=timed_out)


class LeavesGrandchildren(_Plain):
    """Kills the shell alone. The child ends by itself after a while, so that the test leaves nothing."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        command = command.replace("(while true", "(exec >/dev/null; for i in $(seq 60)")
        return await super().exec(command, timeout=timeout, cwd=cwd, env=env)


class SilentTimeout(SubprocessSandbox):
    """A timeout looks like an end."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        result = await super().exec(command, timeout=timeout, cwd=cwd, env=env)
        return dataclasses.replace(result, timed_out=False)


class LosesOutput(SubprocessSandbox):
    """A timeout has no output."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        result = await super().exec(command, timeout=timeout, cwd=cwd, env=env)
        return dataclasses.replace(result, stdout=b"") if result.timed_out else result


class TextOnly(SubprocessSandbox):
    """Files are text."""

    async def download(self, source, target):
        await super().download(source, target)
        if target.is_file():
            target.write_text(target.read_text(encoding="utf-8", errors="replace"), encoding="utf-8")


class FlatDirectories(SubprocessSandbox):
    """Copies the directory, not what is in it."""

    async def download(self, source, target):
        await super().download(source, target)
        if target.is_dir():
            for path in target.rglob("*"):
                if path.is_file():
                    path.unlink()


class StopsOnce(SubprocessSandbox):
    """A second stop fails."""

    async def stop(self):
        assert self.root.is_dir()
        await super().stop()


class LeavesProcesses(_Plain):
    """Stops what it has forgotten."""

    async def stop(self):
        self._mark = "another"
        await super().stop()


class Shielded(_Plain):
    """The command does not notice that nobody waits for it."""

    async def exec(self, command, *, timeout, cwd=None, env=None):
        return await asyncio.shield(super().exec(command, timeout=timeout, cwd=cwd, env=env))


FAULTS = {
    "a_command_gives_status_and_output": (NoStatus, OneStream),
    "environment_and_directory_are_those_asked_for": (NoEnvironment, NoDirectory),
    "a_timeout_kills_the_children_too": (LeavesGrandchildren, SilentTimeout, LosesOutput),
    "files_go_in_and_come_back": (TextOnly, FlatDirectories),
    "stop_is_idempotent": (StopsOnce,),
    "nothing_is_left_running": (LeavesProcesses,),
    "cancellation_ends_the_command": (Shielded,),
}
