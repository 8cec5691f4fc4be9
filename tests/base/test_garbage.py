"""What lives long is out of the collector's sight, and still goes."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from miles_core.garbage import Freezer, settle, unsettle


class Thing:
    """May hold itself."""

    def __init__(self) -> None:
        self.held: object = None


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """A freezer is global to the process: leave it as it was."""
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    if enabled:
        gc.enable()


def cycle() -> tuple[Thing, weakref.ref[Thing]]:
    thing = Thing()
    thing.held = thing
    return thing, weakref.ref(thing)


def test_what_is_frozen_is_not_walked_and_goes_with_its_last_reference() -> None:
    freezer = Freezer()
    assert not gc.isenabled()
    thing = Thing()
    freezer.tick(idle=True)
    assert all(found is not thing for found in gc.get_objects())
    gone = weakref.ref(thing)
    del thing
    assert gone() is None
    freezer.close()


def test_young_cycles_go_with_the_next_tick() -> None:
    freezer = Freezer()
    thing, gone = cycle()
    del thing
    freezer.tick(idle=False)
    assert gone() is None
    freezer.close()


@pytest.mark.parametrize("idle", [True, False])
def test_a_cycle_that_ends_while_it_is_frozen_goes_with_the_thaw(monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    freezer = Freezer(idle_thaw=10.0, busy_thaw=100.0)
    thing, gone = cycle()
    freezer.tick(idle=idle)
    del thing
    freezer.tick(idle=idle)
    assert gone() is not None
    later = time.monotonic() + (50.0 if idle else 150.0)
    monkeypatch.setattr("miles_core.garbage.time.monotonic", lambda: later)
    freezer.tick(idle=idle)
    assert gone() is None
    freezer.close()


def test_the_collector_is_left_as_it_was() -> None:
    gc.enable()
    Freezer().close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_has_settled_is_not_walked_until_that_is_undone() -> None:
    before, after = Thing(), None
    settle()
    assert gc.isenabled()
    after = Thing()
    seen = gc.get_objects()
    assert any(found is after for found in seen)
    assert all(found is not before for found in seen)
    unsettle()
    assert any(found is before for found in gc.get_objects())
