"""Errors travel between processes: what a trainer raises is what the controller reports."""

from __future__ import annotations

import inspect
import pickle

import pytest

from miles_core import errors
from miles_core.errors import ConfigError, DataError, MilesError, Problem

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MilesError)]


def example(kind: type[MilesError]) -> MilesError:
    if kind is ConfigError:
        return ConfigError([Problem(key="schedule.mode", message="unknown")])
    if kind is DataError:
        return DataError("not JSON", file="rows.jsonl", line=3, field="prompt")
    return kind("what failed, and how to fix it")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_after_pickling(kind):
    error = example(kind)
    error.add_note("while stopping")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
