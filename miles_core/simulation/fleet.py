"""The engines together: where episodes go, and when the next request ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from miles_core.simulation.engine import Engine, Request, decode_rates
from miles_core.simulation.scenario import EnginesSection

__all__ = ["Fleet"]


class Fleet:
    """`wake(time, engine)` asks for a call of `ended(engine)` at that time."""

    def __init__(self, section: EnginesSection, wake: Callable[[float, int], None]) -> None:
        rates = decode_rates(section.decode, section.slots)
        self.engines = [Engine(rates, prefill=section.prefill) for _ in range(section.count)]
        self.peak_rate = max(rate * running for running, rate in enumerate(rates))
        """Most tokens a second of one engine."""
        self.prefill_rate = section.prefill
        self._wake = wake
        self._episodes = [0] * section.count
        self._least = [(0, index) for index in range(section.count)]

    def assign(self) -> int:
        """The engine with the fewest episodes, for one more."""
        least, episodes = self._least, self._episodes
        while least[0][0] != episodes[least[0][1]]:
            heapq.heappop(least)
        index = least[0][1]
        episodes[index] += 1
        heapq.heapreplace(least, (episodes[index], index))
        return index

    def release(self, index: int) -> None:
        """An episode of this engine ended."""
        self._episodes[index] -= 1
        heapq.heappush(self._least, (self._episodes[index], index))
        if len(self._least) > 4 * len(self.engines) + 1024:
            self._least = [(episodes, place) for place, episodes in enumerate(self._episodes)]
            heapq.heapify(self._least)

    def submit(self, index: int, request: Request, now: float) -> None:
        engine = self.engines[index]
        engine.advance(now)
        engine.submit(request)
        self._look(index, engine)

    def cancel(self, index: int, request: Request, now: float) -> list[tuple[int, int]]:
        """Take a request out. Returns what it had sampled, as `Engine.sampled_by`."""
        engine = self.engines[index]
        engine.advance(now)
        spans = engine.sampled_by(request) if request.running else []
        engine.cancel(request)
        self._look(index, engine)
        return spans

    def ended(self, index: int, now: float) -> list[tuple[Request, list[tuple[int, int]]]]:
        """The requests of an engine that are through, with what they sampled; none when the call came for nothing."""
        engine = self.engines[index]
        if now < engine.wake:
            return []
        engine.wake = float("inf")
        engine.advance(now)
        through = [(request, engine.sampled_by(request)) for request in engine.ended()]
        self._look(index, engine)
        return through

    def pause(self, seconds: float, now: float) -> None:
        """Every engine stands still for `seconds`."""
        for engine in self.engines:
            engine.advance(now)
            engine.pause(seconds)

    def update(self, version: int, now: float, *, recompute: bool) -> None:
        """Every engine serves this version from now on."""
        for engine in self.engines:
            engine.advance(now)
            engine.update(version, recompute=recompute)

    def _look(self, index: int, engine: Engine) -> None:
        """A later end than expected costs one call for nothing, an earlier one a second call."""
        end = engine.next_end()
        if end < engine.wake:
            engine.wake = end
            self._wake(end, index)
