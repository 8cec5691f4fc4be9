"""Files and directories that are either complete or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_core.errors import MilesError, RunDirectoryError

__all__ = ["atomic_directory", "begin_directory", "complete_directory", "write_atomic", "writing"]


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Whatever writing meets inside (a full disk, above all) becomes a `RunDirectoryError` that names it."""
    try:
        yield
    except MilesError:
        raise
    except Exception as error:
        raise RunDirectoryError(
            f"{what} could not be written to {path}: {type(error).__name__}: {error}. Free some space, or look after "
            "the disk; `miles resume` goes on from the last complete checkpoint"
        ) from error


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
    temporary = begin_directory(path)
    try:
        yield temporary
        complete_directory(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin_directory(path: Path) -> Path:
    """An empty temporary sibling of `path`, for `complete_directory`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def complete_directory(temporary: Path, path: Path) -> None:
    """Give a temporary directory, once it is on disk, the name `path`."""
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


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
