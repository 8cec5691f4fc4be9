"""Files and directories that are either complete or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_directory", "write_atomic"]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file through a temporary name, fsynced, so that a crash leaves the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary sibling directory that becomes `path` when the block ends well, and vanishes when it does not.

    An existing `path` is moved aside, replaced, and only then removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _fsync(file)
        if path.exists():
            aside = path.with_name(f".{path.name}.{os.getpid()}.old")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            temporary.rename(path)
            shutil.rmtree(aside)
        else:
            temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
