"""Memory that can be registered: an anonymous mapping, or a file in memory that others map too."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

__all__ = ["Region"]


class Region:
    """`nbytes` of zeros at `address`; `path` names the file, if there is one. Never closed while a view of it lives."""

    def __init__(self, nbytes: int, path: Path | None = None) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self.path = path
        descriptor = -1
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.posix_fallocate(descriptor, 0, self.nbytes)  # no room is an error here, not a SIGBUS later
        try:
            self.map = mmap.mmap(descriptor, self.nbytes)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self.map)
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)

    def close(self) -> None:
        """Unmap, and remove the file's name: who maps it still keeps its pages."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        del self._anchor
        self.view.release()
        self.map.close()
