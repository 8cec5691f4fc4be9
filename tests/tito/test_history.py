"""A repeated history is known by one fingerprint, however it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.tito.history import History, Known
from miles_core.tito.tree import Node

messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}))


def test_messages_are_converted_when_they_are_read_and_once():
    seen = []

    def convert(raw: Any, index: int) -> dict[str, Any]:
        seen.append(index)
        return {"content": raw}

    history = History(["a", "b", "c"], convert)
    assert seen == []
    assert history[-1] == {"content": "c"}
    assert history[1:] == [{"content": "b"}, {"content": "c"}]
    assert seen == [2, 1]
    assert len(history) == 3
    with pytest.raises(IndexError):
        history[3]


@given(messages, st.data())
def test_a_fingerprint_is_that_of_the_messages_whatever_was_read_before(given_messages, data):
    counts = data.draw(st.lists(st.integers(0, len(given_messages)), max_size=5))
    history = History(given_messages)
    for count in counts:
        assert history.fingerprint(count) == History(given_messages[:count]).fingerprint(count)


@given(messages, messages, st.integers(0, 5))
def test_equal_fingerprints_are_messages_written_alike(first, second, count):
    """The order of the keys counts: a template may render them in it."""
    one, other = first[:count], second[:count]
    same = History(one).fingerprint(len(one)) == History(other).fingerprint(len(other))
    assert same == (json.dumps(one) == json.dumps(other))


def test_keys_in_another_order_are_written_otherwise():
    one, other = [{"role": "user", "content": ""}], [{"content": "", "role": "user"}]
    assert History(one).fingerprint(1) != History(other).fingerprint(1)


def test_what_is_known_is_the_whole_of_it_under_one_identity():
    history = History([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    known = Known(Node(None, (), None, 0), b"tools", history, (b"digest",))
    assert known.repeated(b"tools", history) == (b"digest",)
    assert known.repeated(b"other tools", history) == ()
    assert known.repeated(b"tools", History([])) == ()
    assert known.repeated(b"tools", History([{"role": "user", "content": "A"}])) == ()
    assert known.repeated(b"tools", History(["a"], lambda raw, _: {"role": "user", "content": raw})) == ()
