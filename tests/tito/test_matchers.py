"""Digests: what is one message to a matcher, and what never is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.contracts.component import ComponentConfig
from miles_core.tito.matchers import RoleContentMatcher, StrictMatcher, ToolArgumentsMatcher

STRICT, ARGUMENTS, ROLE = (m(ComponentConfig()) for m in (StrictMatcher, ToolArgumentsMatcher, RoleContentMatcher))

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(scalars, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=3), s, max_size=3)),
    max_size=4,
)


def called(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}}],
    }


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=200, deadline=None)
@given(value=objects)
def test_another_spelling_of_the_arguments_is_the_same_message(value: dict[str, Any]):
    one, other = json.dumps(value), json.dumps(shuffled(value), ensure_ascii=False, separators=(",", ":"), indent=1)
    assert ARGUMENTS.digest(called(one)) == ARGUMENTS.digest(called(other))


@settings(max_examples=200, deadline=None)
@given(one=objects, other=objects)
def test_other_arguments_are_another_message(one: dict[str, Any], other: dict[str, Any]):
    same = ARGUMENTS.digest(called(json.dumps(one))) == ARGUMENTS.digest(called(json.dumps(other)))
    assert same == equal(one, other)


def equal(a: Any, b: Any) -> bool:
    """JSON equality: a number is no boolean."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return json.dumps(a) == json.dumps(b) or a == b
    return type(a) is type(b) and a == b


def test_the_clients_spelling_of_the_field():
    """Compact, escapes, sorted keys, 1.0 as 1: what a client that parses and writes again makes of arguments."""
    written = '{"path": "a.py", "n": 1.0, "s": "\\u00e9"}'
    again = '{"n":1,"path":"a.py","s":"é"}'
    assert ARGUMENTS.digest(called(written)) == ARGUMENTS.digest(called(again))
    assert STRICT.digest(called(written)) != STRICT.digest(called(again))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a":10}', '{"a":1e1}', True),
        ('{"a":-0.0}', '{"a":0}', True),
        ('{"a":0.10}', '{"a":0.1}', True),
        ('{"a":1e400}', '{"a":10e399}', True),
        ('{"a":12345678901234567890123456789012345678901}', '{"a":12345678901234567890123456789012345678902}', False),
        ('{"a":true}', '{"a":1}', False),
        ('{"a":"1"}', '{"a":1}', False),
        ('{"a":1,"a":1}', '{"a":1}', False),
        ('{"a":NaN}', '{"a": NaN}', False),
        ('{"a":1', '{"a": 1', False),
        ('{"a":null}', "{}", False),
        ('{"number":["","1",0]}', '{"number":1}', False),
        ("[" * 5000, "[" * 5000 + " ", False),
    ],
)
def test_numbers_are_decimals_and_what_is_not_json_is_text(one: str, other: str, same: bool):
    assert (ARGUMENTS.digest(called(one)) == ARGUMENTS.digest(called(other))) is same
    assert ARGUMENTS.digest(called(one)) == ARGUMENTS.digest(called(one))


@pytest.mark.parametrize("matcher", [STRICT, ARGUMENTS, ROLE])
def test_nothing_said_and_text_blocks(matcher: Any):
    base = {"role": "assistant", "content": ""}
    for empty in (None, "", []):
        same = {**base, "content": empty, "reasoning_content": empty, "tool_calls": empty, "refusal": None}
        assert matcher.digest(same) == matcher.digest(base)
    blocks = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}]
    assert matcher.digest({"role": "user", "content": blocks}) == matcher.digest({"role": "user", "content": "abc"})
    assert matcher.digest({"role": "user", "content": "\ud800"}) != matcher.digest({"role": "user", "content": "?"})


def test_role_content_merges_and_says_so():
    reasoned = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    assert RoleContentMatcher.merges_histories
    assert ROLE.digest(reasoned) == ROLE.digest({"role": "assistant", "content": "x"})
    assert STRICT.digest(reasoned) != STRICT.digest({"role": "assistant", "content": "x"})
