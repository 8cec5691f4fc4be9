"""Writing so that a crash leaves the old or the new, never a part: the few system calls that it takes, by name.

All of them go through `os`, one call a step; the crash tests die at each.
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

__all__ = ["Output", "checksum_of", "replace_file", "sync_directory", "write_file"]


class Output:
    """A new file that is written from front to end; `finish` makes it durable."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            written = os.write(self._descriptor, view)
            self.size += written
            view = view[written:]

    def pad_to(self, offset: int) -> None:
        self.write(bytes(offset - self.size))

    def finish(self) -> None:
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Create `path`, durably but for its name: see `sync_directory`."""
    output = Output(path)
    try:
        output.write(data)
        output.finish()
    finally:
        output.close()


def replace_file(path: Path, data: bytes) -> None:
    """Set the whole content of a file that readers look at, at once. Not durable: what is lost is found again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_of(pieces: list[bytes]) -> str:
    """xxh3-128 of the pieces, one after another."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
