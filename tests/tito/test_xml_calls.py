"""XML tool calls: what a value means is what the schema says, and its spelling is kept."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.tito.families.hermes import HermesCalls
from miles_core.tito.families.xml_calls import XmlCalls, schema_of
from miles_core.tito.generated import BROKEN

JSON_WORDS, PYTHON_WORDS = XmlCalls(), XmlCalls(python_words=True)


def tool(**properties: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties, "$defs": {"Point": {"type": "object"}}}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def call(arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def written(calls: XmlCalls, arguments: str) -> str:
    return "".join(text for text, _ in calls.pieces("", [call(arguments)]))


def read(calls: XmlCalls, value: str, schema: Any) -> str:
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    _, found, _ = calls.extract(text, tool(x=schema) if schema is not None else ())
    assert written(calls, found[0]["function"]["arguments"]) == text or value.strip() != value
    return json.dumps(json.loads(found[0]["function"]["arguments"])["x"])


@pytest.mark.parametrize(
    ("value", "schema", "meant"),
    [
        ("1", {"type": "integer"}, "1"),
        ("1", {"type": "string"}, '"1"'),
        ("1", {}, '"1"'),
        ("1", None, '"1"'),
        ("1.0", {"type": "number"}, "1.0"),
        ("one", {"type": "integer"}, '"one"'),
        ("true", {"type": "boolean"}, "true"),
        ("null", {"type": ["string", "null"]}, "null"),
        ("5", {"type": ["string", "integer"]}, '"5"'),
        ('{"a":1}', {"type": "object"}, '{"a": 1}'),
        ('{"a":1}', {"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"a": 1}'),
        ('{"a":1}', {"$ref": "#/$defs/Point"}, '{"a": 1}'),
        ('{"a": 1, "a": 2}', {"type": "object"}, '"{\\"a\\": 1, \\"a\\": 2}"'),
        ('"quoted"', {"type": "integer"}, '"\\"quoted\\""'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("a</parameter>b", {"type": "string"}, '"a</parameter>b"'),
        ("<tool_call>", {"type": "string"}, '"<tool_call>"'),
        ("", {"type": "string"}, '""'),
    ],
)
def test_the_schema_says_what_a_value_means(value: str, schema: Any, meant: str):
    assert read(JSON_WORDS, value, schema) == meant


def test_both_spellings_of_true_are_read_and_the_format_writes_its_own():
    assert read(PYTHON_WORDS, "True", {"type": "boolean"}) == "true"
    assert "\nTrue\n" in written(PYTHON_WORDS, '{"x": true}')
    assert "\ntrue\n" in written(JSON_WORDS, '{"x": true}')
    assert "\nNone\n" in written(PYTHON_WORDS, '{"x": null}')


def test_a_schema_that_refers_to_itself_ends():
    loop = tool(x={"$ref": "#/properties/x"})
    assert schema_of(loop, "f", "x") == {}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
hostile = st.lists(
    st.sampled_from(
        ["</parameter>", "<parameter=y>", "</function>", "</tool_call>", "<tool_call>", "\n", "1", " ", "é"]
    ),
    max_size=4,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=hostile | st.text(max_size=6), value=values, escaped=st.booleans())
def test_parsing_gives_back_what_was_rendered(text: str, value: Any, escaped: bool):
    """A text by its schema, any other value by its own; unless the text spells the end of its own parameter."""
    arguments = json.dumps({"text": text, "value": value}, ensure_ascii=escaped)
    kinds = {"type": ["object", "array", "integer", "number", "boolean", "null"]}
    offered = tool(text={"type": "string"}, value=kinds)
    content, found, malformed = JSON_WORDS.extract(written(JSON_WORDS, arguments), offered)
    if re.search(r"</parameter>\s*(<parameter=|</function>)", text):
        return
    assert (content, malformed) == ("", ())
    assert json.loads(found[0]["function"]["arguments"]) == json.loads(arguments)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *BROKEN,
                "hello",
                "\n",
                written(JSON_WORDS, '{"x": 1}'),
                '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
            ]
        ),
        max_size=6,
    )
)
@pytest.mark.parametrize("calls", [JSON_WORDS, HermesCalls()], ids=["xml", "hermes"])
def test_what_is_read_is_read_again(calls: XmlCalls, pieces: list[str]):
    """Broken and whole calls in any order: the message that they are read as is rendered to text that says the same."""
    content, found, malformed = calls.extract("".join(pieces))
    again = "".join(text for text, _ in calls.pieces(content, found))
    assert calls.extract(again) == (content, found, malformed)


def test_a_broken_call_is_not_mended_by_its_neighbours():
    """Taking the whole call out of the middle of a broken one would leave another whole one behind."""
    inner = '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
    text = f'<tool_call>\n{{"name": "a", "arguments": {inner}{{}}}}\n</tool_call>'
    content, found, malformed = HermesCalls().extract(text)
    assert (content, found) == (text, ())
    assert malformed


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=x>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\nf(1)\n</tool_call>",
    ],
)
def test_malformed_calls_stay_in_the_content(broken: str):
    content, found, malformed = JSON_WORDS.extract(f"hello\n\n{broken}")
    assert (content, found, malformed) == (f"hello\n\n{broken}", (), (broken,))


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": 1} x', '{"a": 1, "a": 2}'])
def test_arguments_that_are_no_object_are_refused(arguments: str):
    with pytest.raises(ValueError, match="arguments of the tool call 'f'"):
        written(JSON_WORDS, arguments)
