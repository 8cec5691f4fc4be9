"""Laws of the scheduler, with a fake model that samples token 5."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.engines.embedded.protocol import GenerateRequest, SamplingParams
from miles_core.engines.embedded.scheduler import Scheduler
from miles_core.engines.embedded.sequence import Sequence


def sequence(ids: list[int], count: int, *, arrival: int = 0, priority: int = 0) -> Sequence:
    sampling = SamplingParams(max_new_tokens=count, sampling_seed=0)
    request = GenerateRequest(rid=str(arrival), input_ids=tuple(ids), sampling=sampling, priority=priority)
    return Sequence(request=request, arrival=arrival)


def run(scheduler: Scheduler, steps: int = 10_000) -> list[list[tuple[str, int, int]]]:
    """Run until nothing is left, checking each plan; return what each step computed."""
    written: dict[int, tuple[int, ...]] = {}
    trace = []
    for _ in range(steps):
        plan = scheduler.plan()
        if plan is None:
            break
        trace.append([(s.sequence.request.rid, s.start, s.stop) for s in plan.segments])
        assert all(segment.stop - segment.start == 1 for segment in plan.decode)
        assert [segment.sequence.row for segment in plan.decode] == list(range(len(plan.decode)))
        fresh_slots = [slot for s in plan.segments for slot in s.sequence.slots[s.start : s.stop].tolist()]
        assert len(set(fresh_slots)) == len(fresh_slots)
        for segment in plan.segments:
            one = segment.sequence
            for position in range(segment.start, segment.stop):
                written[int(one.slots[position])] = tuple(one.ids[: position + 1])
        for segment in plan.segments:  # all a token attends to is there, and is its own prefix
            one = segment.sequence
            for position in range(segment.stop):
                assert written[int(one.slots[position])] == tuple(one.ids[: position + 1])
        sampled = [segment.sequence for segment in plan.segments if segment.samples]
        scheduler.complete(plan)
        for one in sampled:
            one.append(5, 0.0, 0.0, "0", None)
            if one.finish_reason is not None:
                scheduler.finish(one)
    return trace


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(1, 4), st.integers(24, 60), st.integers(1, 16))
def test_everything_finishes_reads_only_its_own_prefix_and_gives_all_slots_back(
    some: list[tuple[list[int], int, int]], rows: int, slots: int, prefill: int
) -> None:
    def scheduled() -> tuple[Scheduler, list[Sequence]]:
        scheduler = Scheduler(max_running=rows, max_total_tokens=slots, max_prefill_tokens=prefill)
        sequences = [
            sequence(ids, count, arrival=index, priority=priority) for index, (ids, count, priority) in enumerate(some)
        ]
        for one in sequences:
            scheduler.add(one)
        return scheduler, sequences

    scheduler, sequences = scheduled()
    trace = run(scheduler)
    assert all(len(one.logprobs) == count for one, (_, count, _) in zip(sequences, some, strict=True))
    assert scheduler.slots.free + scheduler.cache.evictable == slots
    assert trace == run(scheduled()[0])  # a pure function of the queue


def test_a_group_that_arrives_together_is_prefilled_once_in_one_step() -> None:
    scheduler = Scheduler(max_running=8, max_total_tokens=200, max_prefill_tokens=100)
    group = [sequence([1, 2, 3, 4, 5, 6], 2, arrival=index) for index in range(4)]
    for one in group:
        scheduler.add(one)
    plan = scheduler.plan()
    assert plan is not None
    assert [len(plan.extend), len(plan.decode)] == [1, 3]
    assert [one.cached_tokens for one in group] == [0, 5, 5, 5]


def test_a_freed_row_is_filled_in_the_next_step() -> None:
    scheduler = Scheduler(max_running=2, max_total_tokens=200, max_prefill_tokens=100)
    for index, count in enumerate((1, 4, 2, 2)):
        scheduler.add(sequence([index, 9], count, arrival=index))
    trace = run(scheduler)
    assert [len(step) for step in trace] == [2, 2, 2, 2, 1]


def test_the_queue_is_ordered_by_priority_then_arrival() -> None:
    scheduler = Scheduler(max_running=1, max_total_tokens=64, max_prefill_tokens=64)
    for index, priority in enumerate((3, 1, 3, 0)):
        scheduler.add(sequence([index], 1, arrival=index, priority=priority))
    assert [step[0][0] for step in run(scheduler)] == ["3", "1", "0", "2"]


def test_forgotten_prefixes_are_not_matched_and_running_sequences_keep_theirs() -> None:
    scheduler = Scheduler(max_running=2, max_total_tokens=100, max_prefill_tokens=100)
    first = sequence([1, 2, 3, 4], 3, arrival=0)
    scheduler.add(first)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.complete(plan)
    first.append(5, 0.0, 0.0, "0", None)
    slots = first.slots[:4].copy()
    scheduler.forget_prefixes()
    second = sequence([1, 2, 3, 4], 1, arrival=1)
    scheduler.add(second)
    assert scheduler.plan() is not None
    assert second.cached_tokens == 0
    assert np.array_equal(first.slots[:4], slots)
    assert not set(second.slots[:4].tolist()) & set(slots.tolist())
