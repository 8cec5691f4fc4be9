"""The routing table against a slow one that keeps no counters, and its promises one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles_core.routing.table import Route, RoutingTable

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def table(*urls: str, **options: int) -> RoutingTable:
    made = RoutingTable(**options)
    for url in urls:
        made.add(url)
    return made


def test_a_session_stays_and_new_ones_go_to_the_least_load():
    made = table(A, B)
    first = made.choose("s")
    made.started(first, 100)
    assert made.choose("t") == Route(B)
    made.started(Route(B), 1000)
    assert made.choose("s") == first == Route(A)  # its own place, whatever the load
    assert made.choose("u") == Route(A)  # fewer tokens
    made.finished(Route(B), 1000)
    assert made.choose("v") == Route(B)


def test_a_drained_or_failed_engine_moves_its_sessions_once():
    made = table(A, B)
    assert made.choose("s") == Route(A)
    assert made.choose("s", {A}) == Route(B)
    assert made.choose("s") == Route(B)  # and they do not move back
    made.engine(B).drained = "gone"
    assert made.choose("s") == Route(A)
    assert made.pin("s").moves == 2
    made.engine(A).drained = "gone too"
    assert made.choose("s") is None
    assert made.drained == {A: "gone too", B: "gone"}


def test_ranks_are_places_of_their_own():
    made = RoutingTable()
    made.add(A, ranks=2)
    assert made.choose("s") == Route(A, 0)
    made.started(Route(A, 0), 5)
    assert made.choose("t") == Route(A, 1)
    assert made.choose("s") == Route(A, 0)
    made.set_ranks(A, 1)  # started again with one rank: what is pinned to the second moves
    assert made.choose("t") == Route(A, 0)
    made.finished(Route(A, 1), 5)
    assert made.engine(A).requests == [0]


def test_a_request_without_a_session_is_pinned_nowhere():
    made = table(A)
    assert made.choose() == Route(A)
    assert not list(made.pins())


def test_idle_sessions_are_forgotten_oldest_first():
    made = table(A, max_pins=3)
    for now, key in enumerate("abcd"):
        made.choose(key, now=float(now))
    assert [key for key, _ in made.pins()] == ["b", "c", "d"]
    made.choose("b", now=9.0)
    assert made.expire(9.0) == 2
    assert [key for key, _ in made.pins()] == ["b"]


def test_hit_rates():
    made = table(A)
    made.choose("s")
    made.account("s", Route(A), prompt_tokens=100, cached_tokens=75)
    made.account("s", Route(C), prompt_tokens=100, cached_tokens=0)  # an engine that was removed meanwhile
    assert made.engine(A).hit_rate == 0.75
    assert made.pin("s").cached_tokens == 75


STEPS = st.sampled_from(["start", "finish", "drain", "admit", "add", "remove", "choose"])


@given(st.lists(st.tuples(STEPS, st.integers(0, 5)), max_size=60))
def test_counts_equal_those_of_a_list_of_requests(steps):
    """The oracle keeps every running request and counts anew each time."""
    made, urls, running, drained = table(A, B), [A, B], [], set()
    pins: dict[str, str] = {}
    for what, number in steps:
        url = (A, B, C)[number % 3]
        if what == "add" and url not in urls:
            made.add(url)
            urls.append(url)
            running = [r for r in running if r[0] != url]
        elif what == "remove" and url in urls:
            made.remove(url)
            urls.remove(url)
            drained.discard(url)
            running = [r for r in running if r[0] != url]
        elif what == "drain" and url in urls:
            made.engine(url).drained = "test"
            drained.add(url)
        elif what == "admit" and url in urls:
            made.engine(url).drained = ""
            drained.discard(url)
        elif what in ("start", "choose"):
            key = f"s{number}"
            route = made.choose(key)
            serving = [u for u in urls if u not in drained]
            if not serving:
                assert route is None
                continue
            loads = {
                u: (sum(r[1] for r in running if r[0] == u), sum(1 for r in running if r[0] == u)) for u in serving
            }
            expected = pins.get(key) if pins.get(key) in serving else min(serving, key=loads.__getitem__)
            assert route == Route(expected)
            pins[key] = expected
            if what == "start":
                made.started(route, 10 * number)
                running.append((route.url, 10 * number))
        elif what == "finish" and running:
            done = running.pop(number % len(running))
            made.finished(Route(done[0]), done[1])
    for url in urls:
        assert made.engine(url).requests == [sum(1 for r in running if r[0] == url)]
        assert made.engine(url).tokens == [sum(r[1] for r in running if r[0] == url)]
