"""The routing table: engines, their load, and which session belongs to which of them. No input or output.

One table serves the engine pool of a run or session server and the stand-alone router, so that both route alike.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = ["EngineLoad", "Pin", "Route", "RoutingTable"]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """An engine, and the data-parallel rank of it that holds the session's prefix."""

    url: str
    rank: int = 0


@dataclasses.dataclass(slots=True)
class EngineLoad:
    """What the table knows of one engine. Lists have one value a data-parallel rank."""

    url: str
    requests: list[int]
    """Requests that run now."""
    tokens: list[int]
    """Prompt tokens of the requests that run now."""
    drained: str = ""
    """Why nothing is routed to it; empty when it serves."""
    served: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ranks(self) -> int:
        return len(self.requests)

    @property
    def hit_rate(self) -> float:
        """Cached over prompt tokens of what it served; 0 before anything was."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclasses.dataclass(slots=True)
class Pin:
    """A session's place, and what its prompts found in the cache there. `used` is a time of the caller's clock."""

    route: Route
    used: float = 0.0
    moves: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class RoutingTable:
    """Chooses engines. A session (a routing key) stays where it is until that engine is drained or was just tried in
    vain; a new one goes to the rank with the fewest running tokens, then requests, then the one that was added first.
    """

    def __init__(self, *, max_pins: int = 1_000_000) -> None:
        """Beyond `max_pins` sessions the one that was idle longest loses its pin; it pays a prefill when it is back."""
        self._engines: dict[str, EngineLoad] = {}
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._max_pins = max_pins

    # Engines.

    def add(self, url: str, *, ranks: int = 1, drained: str = "") -> EngineLoad:
        """Raises `ValueError` for an engine that is there already."""
        if url in self._engines:
            raise ValueError(f"{url} is routed to already")
        engine = EngineLoad(url=url, requests=[0] * ranks, tokens=[0] * ranks, drained=drained)
        self._engines[url] = engine
        return engine

    def remove(self, url: str) -> None:
        """Its sessions move with their next request. Raises `KeyError` for an unknown one."""
        del self._engines[url]

    def set_ranks(self, url: str, ranks: int) -> None:
        """The engine was found to have so many data-parallel ranks. What runs on it is counted anew."""
        engine = self._engines[url]
        if engine.ranks != ranks:
            engine.requests, engine.tokens = [0] * ranks, [0] * ranks

    def engine(self, url: str) -> EngineLoad:
        return self._engines[url]

    def engines(self) -> Sequence[EngineLoad]:
        return list(self._engines.values())

    def __contains__(self, url: str) -> bool:
        return url in self._engines

    def open(self, tried: Collection[str] = ()) -> list[EngineLoad]:
        """The engines that serve, without those in `tried`."""
        return [e for e in self._engines.values() if not e.drained and e.url not in tried]

    @property
    def drained(self) -> Mapping[str, str]:
        return {e.url: e.drained for e in self._engines.values() if e.drained}

    # Requests.

    def choose(self, key: str = "", tried: Collection[str] = (), *, now: float = 0.0) -> Route | None:
        """Where a request of this session goes; None when every engine is drained. Engines in `tried` are avoided while
        there are others. An empty key belongs to no session."""
        pin = self._pins.get(key) if key else None
        if pin is not None and self._serves(pin.route, tried):
            pin.used = now
            self._pins.move_to_end(key)
            return pin.route
        candidates = self.open(tried) or self.open()
        if not candidates:
            return None
        route = self._least_loaded(candidates)
        if pin is not None:
            pin.moves += route != pin.route
            pin.route, pin.used = route, now
            self._pins.move_to_end(key)
        elif key:
            self._pins[key] = Pin(route=route, used=now)
            if len(self._pins) > self._max_pins:
                self._pins.popitem(last=False)
        return route

    def started(self, route: Route, tokens: int) -> None:
        """A request with a prompt of so many tokens was sent there."""
        engine = self._engines.get(route.url)
        if engine is not None:
            engine.requests[route.rank] += 1
            engine.tokens[route.rank] += tokens

    def finished(self, route: Route, tokens: int, *, failed: bool = False) -> None:
        """It ended. `tokens` as it was started with."""
        engine = self._engines.get(route.url)
        if engine is not None and engine.requests[route.rank : route.rank + 1] > [0]:  # unless it is counted anew
            engine.requests[route.rank] -= 1
            engine.tokens[route.rank] = max(0, engine.tokens[route.rank] - tokens)
            engine.failed += failed
            engine.served += not failed

    def account(self, key: str, route: Route, *, prompt_tokens: int, cached_tokens: int) -> None:
        """What the engine said of a finished request's prompt."""
        owners: list[EngineLoad | Pin | None] = [self._engines.get(route.url), self._pins.get(key) if key else None]
        for owner in owners:
            if owner is not None:
                owner.prompt_tokens += prompt_tokens
                owner.cached_tokens += cached_tokens

    # Sessions.

    def pin(self, key: str) -> Pin | None:
        return self._pins.get(key)

    def pins(self) -> Iterator[tuple[str, Pin]]:
        """Sessions, the one that was idle longest first."""
        return iter(self._pins.items())

    def forget(self, key: str) -> None:
        """The session ended."""
        self._pins.pop(key, None)

    def expire(self, before: float) -> int:
        """Forget the sessions whose last request was before this time; how many."""
        count = 0
        while self._pins:
            key, pin = next(iter(self._pins.items()))
            if pin.used >= before:
                break
            del self._pins[key]
            count += 1
        return count

    def _serves(self, route: Route, tried: Collection[str]) -> bool:
        engine = self._engines.get(route.url)
        return engine is not None and not engine.drained and route.rank < engine.ranks and route.url not in tried

    @staticmethod
    def _least_loaded(candidates: Sequence[EngineLoad]) -> Route:
        places = ((e.tokens[rank], e.requests[rank], e.url, rank) for e in candidates for rank in range(e.ranks))
        _, _, url, rank = min(places, key=lambda place: place[:2])
        return Route(url, rank)
