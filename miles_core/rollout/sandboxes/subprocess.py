"""Commands as plain child processes in a temporary directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.sandboxes import ExecResult, Sandbox
from miles_core.errors import EnvironmentFailure

__all__ = ["SubprocessSandbox", "SubprocessSandboxConfig"]

_MARKER = "MILES_SANDBOX"
_KILL_ROUNDS = 1000


class SubprocessSandboxConfig(ComponentConfig):
    """Section `[sandbox]` of `subprocess`."""

    directory: str = ""
    """Where temporary directories are made; the system's place for them when empty."""
    inherit: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
    """Environment variables of the run that commands see. Keep secrets out."""
    max_output_bytes: int = Field(default=1 << 20, ge=1)
    """At most this much of each output stream is returned, from its start."""


class SubprocessSandbox(Sandbox[SubprocessSandboxConfig]):
    """Runs commands with the rights of the run: a clean place, no isolation from the machine.

    A command that ends may leave processes behind for the next one (a server); `stop` ends all of them. On Linux they
    are found by a mark in their environment, also when they made a session of their own; elsewhere by process group.
    """

    Config = SubprocessSandboxConfig

    def __init__(self, config: SubprocessSandboxConfig) -> None:
        super().__init__(config)
        self._mark = uuid.uuid4().hex
        self._count = 0
        self._base: Path | None = None
        self._groups: set[int] = set()

    @property
    def root(self) -> Path:
        """The working directory of commands. Raises `EnvironmentFailure` when the sandbox is not up."""
        if self._base is None:
            raise EnvironmentFailure("the sandbox is not started, or stopped already")
        return self._base / "work"

    async def start(self) -> None:
        """See `Sandbox.start`."""
        try:
            self._base = Path(tempfile.mkdtemp(prefix="miles-sandbox-", dir=self.config.directory or None))
            (self._base / "work").mkdir()
        except OSError as error:
            raise EnvironmentFailure(f"no temporary directory for a sandbox: {error}") from error

    async def exec(
        self, command: str, *, timeout: float, cwd: str | None = None, env: dict[str, str] | None = None
    ) -> ExecResult:
        """See `Sandbox.exec`. Output goes through files, so that a process left behind does not hold the call open."""
        directory = self._inside(cwd or ".")
        self._count += 1
        mark = f"{self._mark}.{self._count}."
        assert self._base is not None
        out, err = self._base / f"{self._count}.out", self._base / f"{self._count}.err"
        inherited = {name: os.environ[name] for name in self.config.inherit if name in os.environ}
        try:
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    "/bin/sh",
                    "-c",
                    command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=directory,
                    env={**inherited, "HOME": str(self.root), **(env or {}), _MARKER: mark},
                    start_new_session=True,
                )
        except OSError as error:
            raise EnvironmentFailure(f"the sandbox could not run {command[:100]!r}: {error}") from error
        self._groups.add(process.pid)
        timed_out = False
        try:
            async with asyncio.timeout(timeout):
                await process.wait()
        except TimeoutError:
            timed_out = True
            await self._end(process, mark)
        except BaseException:
            await self._end(process, mark)
            raise
        assert process.returncode is not None
        result = ExecResult(
            exit_code=process.returncode,
            stdout=self._head(out),
            stderr=self._head(err),
            timed_out=timed_out,
        )
        out.unlink()
        err.unlink()
        return result

    async def upload(self, source: Path, target: str) -> None:
        """See `Sandbox.upload`. Raises `ValueError` for a target outside the working directory."""
        await asyncio.to_thread(_copy, source, self._inside(target))

    async def download(self, source: str, target: Path) -> None:
        """See `Sandbox.download`. Raises `ValueError` for a source outside the working directory."""
        await asyncio.to_thread(_copy, self._inside(source), target)

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        base, self._base = self._base, None
        if base is not None:
            await _kill_marked(f"{self._mark}.", self._groups)
            await asyncio.to_thread(_remove, base)

    def _inside(self, path: str) -> Path:
        root = self.root.resolve()
        resolved = (root / path).resolve()
        if not resolved.is_relative_to(root):
            raise ValueError(f"path {path!r} is outside the sandbox's working directory")
        return resolved

    def _head(self, path: Path) -> bytes:
        with path.open("rb") as stream:
            return stream.read(self.config.max_output_bytes)

    async def _end(self, process: asyncio.subprocess.Process, mark: str) -> None:
        """Kill a command with everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await _kill_marked(mark, {process.pid})


async def _kill_marked(mark: str, groups: set[int]) -> None:
    """Kill every process whose mark starts with `mark`, until none is left: one may fork while it is being killed."""
    if sys.platform != "linux":
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        return
    needle = f"\0{_MARKER}={mark}".encode()
    for _ in range(_KILL_ROUNDS):
        found = list(_having(needle))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    raise EnvironmentFailure(f"processes {found} of a sandbox do not die")


def _having(needle: bytes) -> Iterator[int]:
    """Pids of this user's processes in whose initial environment `needle` stands (proc(5), /proc/pid/environ)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # another user's process, or one that has ended
                continue
            if needle in b"\0" + environment:
                yield int(entry.name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
    else:
        shutil.copy2(source, target)


def _remove(base: Path) -> None:
    """Remove a tree, also where a command took the rights to its own directories away."""
    for directory, names, _ in os.walk(base):
        for name in names:
            path = Path(directory, name)
            if not path.is_symlink():
                path.chmod(stat.S_IRWXU)
    shutil.rmtree(base)
