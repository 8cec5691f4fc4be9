"""The pipe that ends a process with its parent: the parent holds our standard input, and its end is ours."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable

__all__ = ["Lifeline"]


class Lifeline:
    """Watches standard input from a thread, from the first moment on: before slow imports, so that a parent that dies
    meanwhile leaves nobody behind. A standard input that is no pipe belongs to no parent that watches over us (a
    terminal, or `/dev/null` of a process in the background), and is left alone. At its end `on_end` is called, if there
    is one by then, and the process ends hard when it has not ended by itself within `grace` seconds."""

    def __init__(self, *, grace: float) -> None:
        self.on_end: Callable[[], None] | None = None
        self._grace = grace
        kind = os.fstat(0).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        # Not sys.stdin.read: a thread blocked in it holds a lock that the interpreter needs to end.
        while os.read(0, 65536):
            pass
        if self.on_end is not None:
            self.on_end()
            time.sleep(self._grace)
        os._exit(1)
