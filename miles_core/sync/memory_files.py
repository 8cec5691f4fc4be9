"""Directories for files that other processes map: in memory where the platform has such a file system."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["memory_directory", "memory_root"]


def memory_root() -> Path:
    """Memory-backed where the platform has it; elsewhere the page cache does the same work."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def memory_directory(prefix: str, root: Path | None = None) -> Path:
    """A new directory `PREFIX<pid>-…` of this process. Those of processes that were killed are removed: nobody else
    will."""
    root = root or memory_root()
    for left in root.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
