"""A simulated inference engine: requests share a decoding rate, and prefill and weight updates stop them.

Every running request of an engine decodes at the same rate, so one number stands for all of them: the engine's *work*,
the tokens that a request running from the start would have sampled by now. A request of n tokens that began at work w
ends at work w + n, whatever the rate does meanwhile (processor sharing by virtual time). An arrival, an end or a weight
update costs O(log running), none of them looks at the other requests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

__all__ = ["Engine", "Request", "decode_rates"]

_TOLERANCE = 1e-6
"""Tokens by which rounding may leave a request short of its end."""


class Request:
    """One generation: `tokens` to sample behind a context of `context` tokens, of which `prefill` are not cached.
    `began` is the engine's work at its start, `update` how many weight updates the engine had counted; `owner` is the
    caller's."""

    __slots__ = ("began", "context", "owner", "prefill", "running", "tokens", "update")

    def __init__(self, owner: Any, *, tokens: int, context: int, prefill: float) -> None:
        self.owner = owner
        self.tokens = tokens
        self.context = context
        self.prefill = prefill
        self.running: bool | None = False
        """False in the queue, True in a slot, None when it is over."""
        self.began = 0.0
        self.update = 0


class Engine:
    """`rates[b]` is tokens a second of one request when b run. Times are given, never read."""

    __slots__ = (
        "_active",
        "_base",
        "_begun",
        "_pause",
        "_prefill",
        "_prefill_rate",
        "_queue",
        "_rates",
        "_work",
        "at",
        "busy_seconds",
        "pause_seconds",
        "running",
        "sampled",
        "slot_seconds",
        "updates",
        "wake",
    )

    def __init__(self, rates: Sequence[float], *, prefill: float) -> None:
        self._rates = rates
        self._prefill_rate = prefill
        self._active: list[tuple[float, int, Request]] = []
        self._begun = 0
        self._queue: deque[Request] = deque()
        self._work = 0.0
        self._base = 0.0
        self._pause = self._prefill = 0.0
        self.at = 0.0
        self.running = 0
        self.wake = float("inf")
        """When the owner looks at this engine next."""
        self.updates: list[tuple[float, int]] = [(0.0, 0)]
        """(work at which it began, version) of every version that this engine has served."""
        self.busy_seconds = self.pause_seconds = self.slot_seconds = self.sampled = 0.0

    def advance(self, now: float) -> None:
        """Let time pass up to `now`."""
        seconds = now - self.at
        if seconds <= 0:
            return
        self.at = now
        running = self.running
        if running:
            self.busy_seconds += seconds
            self.slot_seconds += seconds * running
        if self._pause:
            paused = min(seconds, self._pause)
            self._pause -= paused
            self.pause_seconds += paused
            if running:
                self.busy_seconds -= paused
            seconds -= paused
        if self._prefill:
            stalled = min(seconds, self._prefill)
            self._prefill -= stalled
            seconds -= stalled
        if running and seconds:
            done = seconds * self._rates[running]
            self._work += done
            self.sampled += done * running

    def submit(self, request: Request) -> None:
        """Run a request, or queue it while every slot is taken. Advance first."""
        if self.running < len(self._rates) - 1:
            self._begin(request)
        else:
            self._queue.append(request)

    def _begin(self, request: Request) -> None:
        request.running = True
        request.began = self._work
        request.update = len(self.updates)
        self._base += request.context - self._work
        self._prefill += request.prefill / self._prefill_rate
        self.running += 1
        self._begun += 1
        heapq.heappush(self._active, (self._work + request.tokens, self._begun, request))

    def ended(self) -> list[Request]:
        """The requests that are through by now; queued ones take their slots. Advance first."""
        through: list[Request] = []
        active = self._active
        while active and (active[0][2].running is None or active[0][0] <= self._work + _TOLERANCE):
            request = heapq.heappop(active)[2]
            if request.running:
                self._leave(request)
                through.append(request)
        return through

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is. Advance first."""
        if request.running:
            self._leave(request)
        request.running = None

    def _leave(self, request: Request) -> None:
        request.running = None
        self._base -= request.context - request.began
        self.running -= 1
        while self._queue:
            waiting = self._queue.popleft()
            if waiting.running is not None:
                self._begin(waiting)
                break

    def next_end(self) -> float:
        """When a request ends if nothing happens before; infinity when none runs."""
        active = self._active
        while active and active[0][2].running is None:
            heapq.heappop(active)
        if not active:
            return float("inf")
        left = max(active[0][0] - self._work, 0.0)
        return self.at + self._pause + self._prefill + left / self._rates[self.running]

    def pause(self, seconds: float) -> None:
        """Stand still for `seconds`. Advance first."""
        self._pause += seconds

    def update(self, version: int, *, recompute: bool) -> None:
        """Serve another version from here on; with `recompute` the context of every running request is prefilled again.
        Advance first."""
        self.updates.append((self._work, version))
        if recompute and self.running:
            self._prefill += (self._base + self.running * self._work) / self._prefill_rate

    def sampled_by(self, request: Request) -> list[tuple[int, int]]:
        """(version, tokens) of what a running or ended request has sampled up to now, in order. A token belongs to the
        version that was served when it was done. Advance first."""
        done = min(request.tokens, int(self._work - request.began + _TOLERANCE))
        first = request.update
        if first == len(self.updates):
            return [(self.updates[-1][1], done)] if done else []
        spans: list[tuple[int, int]] = []
        before = 0
        for index in range(first, len(self.updates)):
            upto = min(done, int(self.updates[index][0] - request.began + _TOLERANCE))
            if upto > before:
                spans.append((self.updates[index - 1][1], upto - before))
                before = upto
        if done > before:
            spans.append((self.updates[-1][1], done - before))
        return spans


def decode_rates(decode: Sequence[tuple[int, float]], slots: int) -> list[float]:
    """Tokens a second of one request, by how many run (0 to `slots`), from pairs of (requests, tokens a second of all
    together): linear between, proportional below the first, constant above the last."""
    rates = [0.0]
    for running in range(1, slots + 1):
        below = [pair for pair in decode if pair[0] <= running]
        above = [pair for pair in decode if pair[0] > running]
        if not below:
            total = above[0][1] * running / above[0][0]
        elif not above:
            total = below[-1][1]
        else:
            (b0, r0), (b1, r1) = below[-1], above[0]
            total = r0 + (r1 - r0) * (running - b0) / (b1 - b0)
        rates.append(total / running)
    return rates
