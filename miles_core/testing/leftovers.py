"""What a check counts to say that nothing was left behind: tasks of the event loop, processes, files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["children", "has_ended", "leftover_tasks", "listening", "processes_with"]


def leftover_tasks(before: set[asyncio.Task[object]]) -> list[str]:
    """Tasks that run now and were not in `before`, as text; the current one does not count."""
    now = {task for task in asyncio.all_tasks() if not task.done()} - before
    return [repr(task.get_coro()) for task in now if task is not asyncio.current_task()]


def children() -> set[int]:
    """Pids of this process's children that run (not those that ended and wait to be reaped)."""
    own = os.getpid()
    return {pid for pid, parent, state in _table() if parent == own and state != "Z"}


def listening() -> set[int]:
    """TCP ports of IPv4 on which this process or a child of it listens (proc(5), /proc/net/tcp)."""
    inodes = set()
    for pid in {os.getpid(), *children()}:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    table = Path("/proc/net/tcp")
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def processes_with(text: str) -> list[int]:
    """Pids of processes, but this one, whose command line contains `text`. Empty where there is no /proc."""
    found = []
    for pid, _, state in _table():
        if pid != os.getpid() and state != "Z":
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if text.encode() in command:
                found.append(pid)
    return found


async def has_ended(text: str, *, seconds: float = 3.0) -> bool:
    """Whether every process with `text` in its command line ends within `seconds`. One that does not is killed."""
    end = time.monotonic() + seconds
    while found := processes_with(text):
        if time.monotonic() > end:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False
        await asyncio.sleep(0.02)
    return True


def _table() -> Iterator[tuple[int, int, str]]:
    """(pid, parent, state) of every process (proc(5), /proc/pid/stat)."""
    proc = Path("/proc")
    for entry in proc.iterdir() if proc.is_dir() else ():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            yield int(entry.name), int(fields[1]), fields[0]
