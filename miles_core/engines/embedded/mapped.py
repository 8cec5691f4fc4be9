"""Files with weights that a sender wrote, mapped: kept from version to version, locked while they are in use.

Mapping a file anew costs as much as reading it (each of its pages is entered one by one), and senders write to the same
files in turn. So that none writes to what the engine reads, a file in use has a shared lock (`flock`); it goes with the
last reference to its `Hold`, or with the process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Hold", "MappedFiles"]


class Hold:
    """A mapped file that no sender writes to as long as this object lives; its bytes are `data`, uint8 [n]."""

    def __init__(self, descriptor: int, data: NDArray[np.uint8]) -> None:
        self.data = data
        weakref.finalize(self, os.close, descriptor)


class _Mapping:
    """One file, copy-on-write: the engine can never write to it."""

    def __init__(self, path: str, status: os.stat_result) -> None:
        # Opened on its own: a lock belongs to an opening, and a mapping keeps that open.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        if not os.path.samestat(status, os.fstat(self._descriptor)):
            raise ValueError("the file was replaced meanwhile")
        self.data: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY), np.uint8)

    @property
    def named(self) -> bool:
        """Somebody may write another version to it."""
        return os.fstat(self._descriptor).st_nlink > 0


class MappedFiles:
    """The files that were mapped, as long as they have a name."""

    def __init__(self) -> None:
        self._mappings: dict[tuple[int, int], _Mapping] = {}

    def hold(self, path: str) -> Hold:
        """Lock the file, and map it where it is not mapped already. Raises `BlockingIOError` where its sender is
        writing, `OSError` or `ValueError` where it cannot be mapped."""
        self._mappings = {key: mapping for key, mapping in self._mappings.items() if mapping.named}
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            if key not in self._mappings or len(self._mappings[key].data) != status.st_size:
                self._mappings[key] = _Mapping(path, status)
        except BaseException:
            os.close(descriptor)
            raise
        return Hold(descriptor, self._mappings[key].data)

    def forget(self) -> None:
        """Map everything anew next time: the engine has written to its own copy of a page."""
        self._mappings = {}
