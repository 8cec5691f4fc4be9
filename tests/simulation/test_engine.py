"""The engine by virtual time against one that is stepped through time, a little at a time."""

from __future__ import annotations

import random

import pytest

from miles_core.simulation.engine import Engine, Request, decode_rates

RATES = decode_rates([(1, 50.0), (4, 120.0)], 4)


def test_rates_are_linear_between_what_is_given() -> None:
    assert decode_rates([(2, 100.0), (4, 140.0)], 5) == pytest.approx([0, 50, 50, 40, 35, 28])


def stepped(arrivals: list[tuple[float, int, int]], updates: dict[float, bool], step: float) -> list[float]:
    """When each request ends, by brute force: time goes by in steps, prefill first, then everyone decodes."""
    ends = [0.0] * len(arrivals)
    left = [float(tokens) for _, tokens, _ in arrivals]
    done = [0.0] * len(arrivals)
    slots: list[int] = []
    queue: list[int] = []
    stall = now = 0.0
    coming, changes = list(range(len(arrivals))), dict(updates)
    while coming or queue or slots:
        for when in [w for w in changes if w <= now + 1e-12]:
            if changes.pop(when):
                stall += sum(arrivals[i][2] + done[i] for i in slots) / 1000
        queue += [i for i in coming if arrivals[i][0] <= now + 1e-12]
        coming = [i for i in coming if arrivals[i][0] > now + 1e-12]
        while queue and len(slots) < 4:
            slots.append(queue.pop(0))
            stall += arrivals[slots[-1]][2] / 1000
        now += step
        if stall > 0:
            stall -= step
            continue
        for i in list(slots):
            left[i] -= step * RATES[len(slots)]
            done[i] += step * RATES[len(slots)]
        for i in [i for i in slots if left[i] <= 0]:
            slots.remove(i)
            ends[i] = now
    return ends


@pytest.mark.parametrize("seed", range(4))
def test_requests_end_when_they_do_in_the_stepped_engine(seed: int) -> None:
    draw = random.Random(seed)
    arrivals = sorted((draw.uniform(0, 6), draw.randrange(20, 150), draw.randrange(0, 200)) for _ in range(12))
    updates = {draw.uniform(0, 12): draw.random() < 0.5 for _ in range(3)}
    engine = Engine(RATES, prefill=1000.0)
    requests = [Request(i, tokens=n, context=c, prefill=c) for i, (_, n, c) in enumerate(arrivals)]
    events: list[tuple[float, int, object]] = [(at, 0, requests[i]) for i, (at, _, _) in enumerate(arrivals)]
    events += [(at, 1, recompute) for at, recompute in updates.items()]
    events.sort(key=lambda event: event[:2])
    ends: dict[int, float] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    version = 0
    while events or engine.running:
        due = engine.next_end()
        if events and events[0][0] <= due:
            at, _, what = events.pop(0)
            engine.advance(at)
            if isinstance(what, Request):
                engine.submit(what)
            else:
                version += 1
                engine.update(version, recompute=bool(what))
            continue
        engine.advance(due)
        for request in engine.ended():
            ends[request.owner], spans[request.owner] = due, engine.sampled_by(request)
    expected = stepped(arrivals, updates, 0.0005)
    assert [ends[i] for i in range(12)] == pytest.approx(expected, abs=0.03)
    assert [sum(n for _, n in spans[i]) for i in range(12)] == [n for _, n, _ in arrivals]
    assert all([v for v, _ in s] == sorted({v for v, _ in s}) for s in spans.values()), "versions ascend, each once"
    assert engine.sampled == pytest.approx(sum(n for _, n, _ in arrivals))


def test_tokens_belong_to_the_version_that_was_served_when_they_were_done() -> None:
    engine = Engine([0.0, 10.0], prefill=float("inf"))
    request = Request(None, tokens=30, context=0, prefill=0)
    engine.submit(request)
    engine.advance(1.05)
    engine.update(1, recompute=False)
    engine.pause(2.0)
    assert engine.next_end() == pytest.approx(5.0)
    engine.advance(5.0)
    assert engine.ended() == [request]
    assert engine.sampled_by(request) == [(0, 10), (1, 20)]
    assert engine.busy_seconds == pytest.approx(3.0)
