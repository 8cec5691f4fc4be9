"""Buffers in memory that a sender writes and engines map, used again when nobody reads them any more.

Fresh memory costs more than the copy into it (every page is found, cleared and mapped), so a version goes into the
buffer of one long past. Who reads a buffer holds a shared lock on its file (`flock`), which the kernel lets go of when
that process ends, however it ends; a writer takes the exclusive lock first, and another buffer where it cannot.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Self, TypeVar

import numpy as np
import xxhash

__all__ = ["InOrder", "SharedBuffer", "copy_and_check"]

T = TypeVar("T")

_PIECE = 1 << 20
_THREADS = 2
"""One does not take all that a host's memory gives."""
_WORTH_A_THREAD = 1 << 20
"""Bytes that take longer than handing them over."""


def copy_and_check(source: memoryview, target: memoryview) -> str:
    """Copy the bytes, uint8 [n] both; the xxh3-128 of the source, computed piece by piece while it is in the cache."""
    hasher = xxhash.xxh3_128()
    data, place = np.asarray(source), np.asarray(target)
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        hasher.update(piece.data)
        np.copyto(place[start : start + _PIECE], piece)
    return hasher.hexdigest()


class InOrder(Generic[T]):
    """A few threads at work on the tensors of a stream. No more than those are held: `put` waits for the oldest."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "weights")
        self._results: list[Future[T]] = []

    def put(self, nbytes: int, work: Callable[..., T], *arguments: object) -> None:
        """Work on so many bytes; a little of it is done here and now. Raises what the oldest raised."""
        if nbytes < _WORTH_A_THREAD:
            done: Future[T] = Future()
            done.set_result(work(*arguments))
            self._results.append(done)
        else:
            self._results.append(self._pool.submit(work, *arguments))
        if len(self._results) > _THREADS:
            self._results[-1 - _THREADS].result()

    def wait(self) -> None:
        """For everything that was put."""
        for future in self._results[-_THREADS:]:
            future.result()

    def results(self) -> list[T]:
        """Of everything that was put, in order."""
        return [future.result() for future in self._results]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


class SharedBuffer:
    """A new file at `path`, in memory, mapped for writing. It grows with what is written, and stays as large."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = -1
        """Whose bytes it holds; the owner's to set."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._map: mmap.mmap | None = None

    def claim(self) -> bool:
        """Keep readers out, from now to `offer`. False: there is one."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def offer(self) -> None:
        """Let readers in."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def span(self, start: int, nbytes: int) -> memoryview:
        """The bytes to write to. Raises `OSError` when there is no room."""
        held = 0 if self._map is None else len(self._map)
        if start + nbytes > held:
            os.posix_fallocate(self._descriptor, held, start + nbytes - held)  # no room: an error here, no SIGBUS later
            self._map = mmap.mmap(self._descriptor, start + nbytes)
        return memoryview(self._map or b"")[start : start + nbytes]

    def close(self) -> None:
        """Give the name up: who maps the file keeps its pages. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._map = None
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
