"""A clock that moves when a test says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["FakeClock"]


class FakeClock:
    """Time stands still; `advance` moves it, and so do `time.sleep` and `asyncio.sleep`, which return at once.

    `install` puts it behind `time.time`, `time.monotonic`, `time.perf_counter` and both sleeps, for as long as the
    monkeypatch lasts. The event loop reads it too: a timeout fires when the clock has been moved past it.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []
        """Every sleep that was asked for, in seconds."""

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move it forward. Raises `ValueError` for a negative number."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back by {-seconds} s")
        self.now += seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See the class."""
        for name in ("time", "monotonic", "perf_counter"):
            monkeypatch.setattr(f"time.{name}", self)
        yield_once = asyncio.sleep

        def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            self.advance(seconds)

        async def async_sleep(delay: float, result: Any = None) -> Any:
            sleep(delay)
            return await yield_once(0, result)

        monkeypatch.setattr("time.sleep", sleep)
        monkeypatch.setattr("asyncio.sleep", async_sleep)
