"""Writing something to disk while the next steps move on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec

__all__ = ["Beside"]

Arguments = ParamSpec("Arguments")


class Beside:
    """A thread that does one thing at a time."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._work: Future[None] | None = None

    def begin(self, write: Callable[Arguments, None], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        """Let it be done. What came before is waited for; what that met is raised."""
        self.finish()
        self._work = self._thread.submit(write, *args, **kwargs)

    def finish(self, *, wait: bool = True) -> bool:
        """Whether it is done; with `wait` it is. Raises, once, what it met."""
        if self._work is not None and not wait and not self._work.done():
            return False
        work, self._work = self._work, None
        if work is not None:
            work.result()
        return True
