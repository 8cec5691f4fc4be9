"""A body that repeats what is known reads as if it were parsed whole; whatever else a client writes is parsed whole."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.tito.bodies import Body
from miles_core.tito.dialects.chat import ChatDialect
from miles_core.tito.turns import BadRequestError

texts = st.text() | st.sampled_from(['"messages":[', '],"messages":[', "]}", "\\", '"', "é中\u2028", "[", "{"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("messages"), inner, max_size=3),
    max_leaves=6,
)
fields = st.dictionaries(st.sampled_from(["model", "tools", "n", "stop", '"messages":[']), values, max_size=3)


def written(before: dict[str, Any], messages: list[Any], behind: dict[str, Any], spaced: bool) -> bytes:
    """One JSON object with `messages` between the other fields."""
    text = json.dumps(
        {**before, "messages": messages, **behind},
        ensure_ascii=False,
        separators=None if spaced else (",", ":"),
    )
    return text.encode("utf-8", "surrogatepass")


@given(st.lists(values, min_size=1, max_size=4), st.lists(values, max_size=3), fields, fields, fields, st.booleans())
def test_a_body_that_repeats_another_reads_as_it_would_have_alone(old, new, before, between, behind, spaced):
    """The fields around the messages may change, and the messages only grow."""
    first = Body(written(before, old, behind, spaced))
    known = first.written()
    data = written(between, [*old, *new], behind, spaced)
    again = Body(data, known)
    whole = orjson.loads(data)
    assert again.messages() == whole["messages"]
    repeated = 0 if again.known is None else again.known.count
    assert repeated in (0, len(old))
    assert again.fields == {**whole, "messages": [*[None] * repeated, *whole["messages"][repeated:]]}
    after = again.written()
    if after is not None:
        assert after.count == len(old) + len(new)
        assert after == Body(data).written()


def test_the_common_ways_of_writing_are_known_again():
    old = [{"role": "user", "content": 'é "messages":[ ]'}, {"role": "assistant", "content": "y"}]
    tools = [{"function": {"parameters": {"required": ["a"]}}}]
    for before, behind, spaced in (
        ({}, {"model": "m"}, False),
        ({"model": "m"}, {}, True),
        ({"model": "m", "tools": tools}, {"stream": True}, False),
        ({}, {"model": "m", "tools": tools}, True),
    ):
        known = Body(written(before, old, behind, spaced)).written()
        assert known is not None
        assert known.count == 2
        again = Body(written({"seed": 3, **before}, [*old, {"new": [1]}], behind, spaced), known)
        assert again.known is known
        assert again.fields["messages"] == [None, None, {"new": [1]}]


@pytest.mark.parametrize(
    "data",
    [
        b'{"messages":[1],"messages":[2,3]}',  # the last of equal keys counts, and it does not repeat
        b'{"messages":[12]}',  # begins with the same bytes, in the middle of a number
        b'{"messages":[1.5]}',
        b'{"x":{"messages":[1,2]},"messages":[3]}',
        b'{"x":"\\"messages\\":[1,2]","messages":[3]}',
        b'{"messages":[1]}',
        b'{"messages":["1",2]}',
        b'{"messages":[[1,2],3]}',
        b'{"messages":[ 1,2]}',
    ],
)
def test_what_only_looks_like_a_repetition_is_read_whole(data: bytes):
    known = Body(b'{"messages":[1]}').written()
    body = Body(data, known)
    if body.known is not None:  # it is one
        body.fields["messages"][0] = 1
    assert body.fields == orjson.loads(data)
    assert (body.known is not None) == (
        orjson.loads(data)["messages"][:1] == [1] and data.startswith(b'{"messages":[1]')
    )


@given(st.binary(max_size=30) | texts.map(lambda text: f'{{"messages":[{text}]}}'.encode("utf-8", "surrogatepass")))
def test_what_is_no_json_is_refused_with_and_without_something_known(data: bytes):
    known = Body(b'{"messages":[1]}').written()
    for given_known in (None, known):
        try:
            fields = Body(data, given_known).fields
        except BadRequestError:
            with pytest.raises((orjson.JSONDecodeError, AssertionError)):
                assert isinstance(orjson.loads(data or b"{}"), dict)
        else:
            assert fields == orjson.loads(data or b"{}")


def test_no_messages_are_nothing_to_repeat():
    for data in (b"{}", b'{"messages":[]}', b'{"messages":3}', b'{"x":{"messages":[1]},"messages":[]}'):
        assert Body(data).written() is None


def test_a_message_that_is_known_is_read_when_it_is_asked_for():
    old = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    known = Body(written({}, old, {}, False)).written()
    body = Body(written({}, [*old, {"role": "user", "content": "c"}], {}, False), known)
    turn = ChatDialect().read(body.fields)
    turn.messages.body = body
    assert turn.messages[2]["content"] == "c"
    assert body.fields["messages"][0] is None
    assert [m["content"] for m in turn.messages] == ["a", "b", "c"]
