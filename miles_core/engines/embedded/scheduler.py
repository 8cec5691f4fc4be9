"""Which tokens of which sequences the next step computes. No torch, no clock, no randomness.

Continuous batching (Orca, OSDI 2022): every step takes the one next token of each sequence that decodes,
and as much of waiting prompts as fits. A plan is a pure function of the order of the queue, so that two
engines that were given the same queue compute bit-identical batches.

The queue is ordered by (priority, arrival). A prompt enters the prefix cache when it is *planned*, before it
is computed: attention writes all keys and values of a layer before it reads any, so that the members of a
group that arrive together share one prefill in one step.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .prefix_cache import PrefixCache, SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from .prefix_cache import IntArray, Node
    from .sequence import Sequence

HEADROOM_TOKENS = 32
"""Room that admission leaves each running sequence to grow, so that it is rarely retracted at once."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens ``start`` to ``stop`` of one sequence, computed in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the step yields this sequence's next token."""
        return self.stop == len(self.sequence.ids)


@dataclass(kw_only=True)
class Plan:
    """One step. Packed order: ``decode`` by row (rows 0 to len - 1, one token each), then ``extend``."""

    moves: list[tuple[int, int, int]] = field(default_factory=list)
    """(source row, target row, tokens) to copy before the step, so that rows have no holes."""
    decode: list[Segment] = field(default_factory=list)
    extend: list[Segment] = field(default_factory=list)
    fresh: list[Sequence] = field(default_factory=list)
    """Sequences that enter their row in this step."""

    @property
    def segments(self) -> list[Segment]:
        """All segments, in packed order."""
        return self.decode + self.extend


class Scheduler:
    """Queue, rows and slots.

    Args:
        max_running: sequences that hold slots at once (and rows: one each).
        max_total_tokens: slots of the pool.
        max_prefill_tokens: prompt tokens a step; a longer prompt takes several steps.
        routed: bool [slots], whether a slot's routed experts are known; None for a dense model.
        before_release: called with a running sequence that is about to lose its slots.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_total_tokens: int,
        max_prefill_tokens: int,
        routed: npt.NDArray[np.bool_] | None = None,
        before_release: Callable[[Sequence], None] = lambda _sequence: None,
    ) -> None:
        self.slots = SlotAllocator(max_total_tokens)
        self.cache = PrefixCache(self.slots)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._rows: list[Sequence | None] = []
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._routed = routed
        self._before_release = before_release
        self._epoch = 0

    @property
    def used_tokens(self) -> int:
        """Slots that hold keys and values, those of cached prefixes included."""
        return self.slots.capacity - self.slots.free

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self.waiting, sequence, key=lambda queued: queued.order)

    def plan(self) -> Plan | None:
        """Return the next step, or None when there is nothing to do."""
        self._make_room()
        plan = Plan(moves=self._close_holes())
        self._plan_decode(plan)
        budget = self._max_prefill_tokens
        prompts: list[Segment] = []
        for sequence in self.running:
            if sequence.row is None and budget > 0:
                budget -= self._plan_prompt(sequence, budget, prompts)
        growth = sum(_growth(sequence) for sequence in self.running) if self.waiting else 0
        while self.waiting and len(self.running) < self._max_running and budget > 0:
            growth += _growth(self.waiting[0])
            if not self._admit(self.waiting[0], growth):
                break
            sequence = self.waiting.pop(0)
            self.running.append(sequence)
            budget -= self._plan_prompt(sequence, budget, prompts)
        self._seat(plan, prompts)
        return plan if plan.decode or plan.extend else None

    def complete(self, plan: Plan) -> None:
        """Record that a plan's tokens are in the pool."""
        for segment in plan.segments:
            segment.sequence.computed = segment.stop

    def finish(self, sequence: Sequence) -> None:
        """Take a running sequence off; what it computed stays cached."""
        self._before_release(sequence)
        self.running.remove(sequence)
        self._release(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence off, wherever it is."""
        if sequence in self.running:
            self.finish(sequence)
        else:
            self.waiting.remove(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue, with its tokens."""
        self.finish(sequence)
        sequence.retractions += 1
        self.add(sequence)

    def forget_prefixes(self) -> None:
        """Let no later sequence match what was computed so far; running ones go on with what they have."""
        self.cache.detach()
        self._epoch += 1

    def _make_room(self) -> None:
        """Retract the last in order until each decoding sequence can have one more slot."""
        while self.slots.free + self.cache.evictable < sum(row is not None for row in self._rows):
            self.retract(max(self.running, key=lambda sequence: sequence.order))

    def _close_holes(self) -> list[tuple[int, int, int]]:
        """Move the last rows into free ones; return the moves."""
        rows, hole = self._rows, 0
        moves: list[tuple[int, int, int]] = []
        while True:
            while rows and rows[-1] is None:
                rows.pop()
            while hole < len(rows) and rows[hole] is not None:
                hole += 1
            if hole >= len(rows):
                return moves
            moved = rows.pop()
            assert moved is not None
            moves.append((len(rows), hole, moved.computed))
            rows[hole] = moved
            moved.row = hole

    def _plan_decode(self, plan: Plan) -> None:
        for sequence, slot in zip(self._rows, self._take(len(self._rows)), strict=True):
            assert sequence is not None
            position = len(sequence.ids) - 1
            sequence.slots[position] = slot
            sequence.allocated = position + 1
            plan.decode.append(Segment(sequence=sequence, start=position, stop=position + 1))

    def _take(self, count: int) -> IntArray:
        if self.slots.free < count:
            self.cache.evict(count - self.slots.free)
        return self.slots.take(count)

    def _admit(self, sequence: Sequence, growth: int) -> bool:
        """Give a queued sequence the cached prefix and slots for the rest, if there is room for it beside what all
        running sequences and it are expected to grow by."""
        ids = np.array(sequence.ids, dtype=np.int64)
        matched, node = self._match(sequence, ids)
        self.cache.lock(node)
        need = len(ids) - len(matched)
        if self.slots.free + self.cache.evictable < need + growth:
            self.cache.unlock(node)
            return False
        sequence.slots = np.empty(len(ids) + sequence.remaining, dtype=np.int64)
        sequence.slots[: len(matched)] = matched
        sequence.slots[len(matched) : len(ids)] = self._take(need)
        sequence.allocated, sequence.owned, sequence.computed = len(ids), len(matched), len(matched)
        sequence.node, sequence.epoch = node, self._epoch
        if sequence.cached_tokens is None:
            sequence.cached_tokens = len(matched)
        return True

    def _match(self, sequence: Sequence, ids: IntArray) -> tuple[IntArray, Node]:
        """Return the cached prefix that a sequence may use: what it must compute itself is left out."""
        limit = len(ids) - 1  # the last token's logits are wanted
        if sequence.first_logprob is not None:
            limit = min(limit, sequence.first_logprob - 1)
        matched, node = self.cache.match(ids[:limit])
        if sequence.request.return_routed_experts and self._routed is not None:
            known = self._routed[matched]
            if not known.all():
                matched, node = self.cache.match(ids[: int(np.argmin(known))])
        return matched, node

    def _plan_prompt(self, sequence: Sequence, budget: int, prompts: list[Segment]) -> int:
        """Plan up to ``budget`` of a sequence's tokens, and share them; return how many."""
        stop = min(len(sequence.ids), sequence.computed + budget)
        prompts.append(Segment(sequence=sequence, start=sequence.computed, stop=stop))
        if sequence.epoch == self._epoch and sequence.owned == sequence.computed:
            assert sequence.node is not None
            span = slice(sequence.owned, stop)
            ids = np.array(sequence.ids[span], dtype=np.int64)
            leaf = self.cache.extend(sequence.node, ids, sequence.slots[span])
            if leaf is not None:
                self.cache.lock(leaf)
                self.cache.unlock(sequence.node)
                sequence.node, sequence.owned = leaf, stop
        return stop - sequence.computed

    def _seat(self, plan: Plan, prompts: list[Segment]) -> None:
        """Give rows to sequences whose prompt ends in this step, single tokens first: they decode at once."""
        single = [segment for segment in prompts if segment.samples and segment.stop - segment.start == 1]
        longer = [segment for segment in prompts if not (segment.samples and segment.stop - segment.start == 1)]
        plan.decode += single
        plan.extend += longer
        for segment in single + longer:
            if segment.samples:
                segment.sequence.row = len(self._rows)
                self._rows.append(segment.sequence)
                plan.fresh.append(segment.sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take back row and slots; what was computed goes to the prefix cache unless that was forgotten since."""
        if sequence.row is not None:
            self._rows[sequence.row] = None
            sequence.row = None
        assert sequence.node is not None
        first_free = sequence.owned
        if sequence.epoch == self._epoch and sequence.computed > sequence.owned:
            ids = np.array(sequence.ids[: sequence.computed], dtype=np.int64)
            present = self.cache.insert(ids, sequence.slots[: sequence.computed])
            self.slots.give(sequence.slots[sequence.owned : present])
            first_free = sequence.computed
        self.slots.give(sequence.slots[first_free : sequence.allocated])
        self.cache.unlock(sequence.node)
        sequence.slots = np.empty(0, dtype=np.int64)
        sequence.node, sequence.allocated, sequence.owned, sequence.computed = None, 0, 0, 0


def _growth(sequence: Sequence) -> int:
    """Tokens that room is kept for while a sequence is admitted."""
    return min(HEADROOM_TOKENS, sequence.remaining)
