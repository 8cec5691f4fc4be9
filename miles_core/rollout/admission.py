"""Admission: what an episode sees of the engines, in an order that does not depend on timing, and past interruptions.

Batched float arithmetic depends on what is batched together. To make a synchronous step reproducible, its first
requests are gathered and go out together, each with the episode's place in submission order as its priority.

With `partial`, a request that was aborted on purpose (a weight update with `pause = "abort"`, the end of a synchronous
step) goes on behind what it had sampled, so that an environment sees one generation and never the cut.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from miles_core.contracts.engines import Generation, OnTokens, Sampling, TokenIds
from miles_core.rollout.continuation import joined, remainder

__all__ = ["AdmissionClient", "EngineHold", "QueuingEngine"]


class QueuingEngine(Protocol):
    """The engines of a run as the producer needs them."""

    @property
    def interruptions(self) -> int:
        """How often everything in flight was aborted on purpose, twice: odd while that is going on."""
        ...

    async def generate(
        self,
        input_ids: TokenIds,
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation: ...

    async def interrupt(self) -> None:
        """Abort everything in flight; each request answers with what it has."""
        ...

    def forget(self, routing_key: str) -> None: ...


class EngineHold:
    """The engines, and the means to hold them. `partial` continues what is aborted on purpose; `decode` turns token ids
    into the text in which stop strings are looked for."""

    def __init__(
        self,
        engine: QueuingEngine,
        *,
        partial: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        assert decode is not None or not partial, "stop strings across a cut need a decoder"
        self.engine = engine
        self.partial = partial
        self.decode = decode
        self.going = asyncio.Event()
        """Set but between two synchronous steps, when partial episodes wait."""
        self.going.set()
        self._together: list[tuple[int, asyncio.Future[None]]] | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is asked inside waits, and goes out at the end: in submission order, in one turn of the event loop,
        which an engine connection makes one request of. So an engine queues all of it before it looks at any."""
        assert self._together is None, "requests are being gathered already"
        gathered = self._together = []
        try:
            yield
        finally:
            self._together = None
            for _, release in sorted(gathered, key=lambda waiting: waiting[0]):
                if not release.done():
                    release.set_result(None)

    async def turn(self, priority: int, waiting: Callable[[], None]) -> None:
        """Wait while requests are gathered; `waiting()` is called when this one is among them."""
        if self._together is not None:
            release: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._together.append((priority, release))
            waiting()
            await release

    async def park(self) -> None:
        """Interrupt the training episodes: what they ask for waits until `resume`."""
        self.going.clear()
        await self.engine.interrupt()

    def resume(self) -> None:
        """Let parked episodes go on."""
        self.going.set()


class AdmissionClient:
    """One episode's engine client. `queued` is set once its first request waits to go out with the others'.

    `parks` is false for episodes that no step's end interrupts (evaluation). `deadline` is the episode's; it stands
    still while the episode is parked, or waits for the others of its wave.
    """

    def __init__(self, hold: EngineHold, *, priority: int, parks: bool = True) -> None:
        self._hold = hold
        self._priority = priority
        self._continues = parks and hold.partial
        self._parked = 0
        self._left: float | None = None
        self.deadline: asyncio.Timeout | None = None
        self.queued = asyncio.Event()

    async def generate(
        self,
        input_ids: TokenIds,
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """As `EngineClient.generate`; the episode's own place in submission order is the priority."""
        engine = self._hold.engine
        parts: list[Generation] = []
        sampled: list[int] = []
        while True:
            if self._continues and not self._hold.going.is_set():
                await self._standing(self._hold.going.wait())
            await self._standing(self._hold.turn(self._priority + priority, self.queued.set))
            before = engine.interruptions
            part = await engine.generate(
                np.concatenate((np.asarray(input_ids, np.int32), np.array(sampled, np.int32)))
                if sampled
                else input_ids,
                remainder(sampling, len(sampled)),
                routing_key=routing_key,
                priority=self._priority + priority,
                **({} if on_tokens is None else {"on_tokens": _behind(sampled, on_tokens)}),
            )
            parts.append(part)
            interrupted = before % 2 == 1 or engine.interruptions != before
            if not (self._continues and interrupted and part.finish_reason == "abort"):
                break
            sampled = [*sampled, *part.token_ids.tolist()]
            if len(sampled) >= sampling.max_new_tokens:
                break
        if len(parts) == 1:
            return part
        assert self._hold.decode is not None
        return joined(parts, sampling, self._hold.decode)

    async def _standing(self, waiting: Awaitable[object]) -> None:
        """Wait for others: until training episodes go on, or until everybody's first request is there. The first
        request that waits stops the deadline, the last one lets it go on: who hangs fails alone."""
        loop = asyncio.get_running_loop()
        self._parked += 1
        if self._parked == 1 and self.deadline is not None and (when := self.deadline.when()) is not None:
            self._left = when - loop.time()
            self.deadline.reschedule(None)
        try:
            await waiting
        finally:
            self._parked -= 1
            if self._parked == 0 and self._left is not None:
                assert self.deadline is not None
                self.deadline.reschedule(loop.time() + self._left)
                self._left = None


def _behind(sampled: Sequence[int], on_tokens: OnTokens) -> OnTokens:
    """`on_tokens` is given all ids so far, those of earlier parts included."""
    return (lambda ids: on_tokens([*sampled, *ids])) if sampled else on_tokens
