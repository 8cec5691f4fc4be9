"""Keeping the cyclic garbage collector out of the way of a server that holds much for long.

A full collection walks every object that is alive: with thousands of open sessions that stops the event loop for
tenths of a second. Here it runs once a second instead of when it likes, over what is younger than that, and what is
left is frozen, which takes it out of the collector's sight; it is still freed by its reference count. Cycles that end
while they are frozen are found at the next thaw, which waits until the server is idle, or an hour.
"""

from __future__ import annotations

import gc
import time

__all__ = ["Freezer", "settle", "unsettle"]


class Freezer:
    """Make one when the server starts, which freezes what is there, and call `tick` every second. Times are seconds."""

    def __init__(self, *, idle_thaw: float = 600.0, busy_thaw: float = 3600.0) -> None:
        self._idle_thaw = idle_thaw
        self._busy_thaw = busy_thaw
        self._thawed = time.monotonic()
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()

    def tick(self, *, idle: bool) -> None:
        """Collect what is young, and freeze what is left; everything, when it is time."""
        since = time.monotonic() - self._thawed
        if since >= (self._idle_thaw if idle else self._busy_thaw):
            gc.unfreeze()
            self._thawed = time.monotonic()
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Leave the collector as it was."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


def settle() -> None:
    """What is there now stays for the life of the process (modules, models, configs): take it out of the collector's
    sight, which then looks through what a step leaves behind and not, again and again, through all of that."""
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """Undo `settle`, in a process that goes on to do something else."""
    gc.unfreeze()
