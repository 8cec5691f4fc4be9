"""Kimi against the package renderers, and what is Kimi's alone: ids of calls, declarations in TypeScript."""

from __future__ import annotations

import pytest
from miles_models_kimi.family import KimiConfig, KimiFamily
from miles_models_kimi.typescript import declarations

from miles_core.testing.families import assert_equal, plain_conversations, vocabulary
from miles_core.testing.other_renderers import as_renderer


@pytest.mark.parametrize(
    ("version", "thinking", "renderer", "options", "turns"),
    [
        ("k2", True, "kimi-k2", {}, 3),
        ("k2.5", True, "kimi-k2.5", {}, 1),
        ("k2.6", False, "kimi-k2.5", {"thinking": False}, 3),
    ],
)
def test_equals_the_package_renderers_where_that_is_append_only(version, thinking, renderer, options, turns, tmp_path):
    family = KimiFamily(KimiConfig(version=version, thinking=thinking))
    theirs = as_renderer(renderer, options, vocabulary(family, tmp_path))
    reasoning = thinking and version != "k2"
    assert_equal(family, theirs, plain_conversations(200, reasoning=reasoning, turns=turns))


def test_a_call_keeps_its_id_and_one_without_gets_the_next(tmp_path):
    family = KimiFamily(KimiConfig(version="k2"))
    tokenizer = vocabulary(family, tmp_path)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "user", "content": "q"}
    talk = [asked, {"role": "assistant", "content": "", "tool_calls": [{"id": "functions.f:7", **call}]}]
    talk += [{"role": "tool", "tool_call_id": "functions.f:7", "content": "r"}]
    talk += [{"role": "assistant", "content": "", "tool_calls": [call, call]}]
    text = "".join(s.text for s in family.segments(talk))
    assert "<|tool_call_begin|>functions.f:7<" in text
    assert "## Return of functions.f:7\nr" in text
    assert "<|tool_call_begin|>functions.f:1<" in text
    assert "<|tool_call_begin|>functions.f:2<" in text
    sampled = [s for s in family.segments(talk) if s.message == 3 and s.sampled]
    ids = [tokenizer.special(s.text) if s.special else tokenizer.encode(s.text) for s in sampled]
    flat = [i for part in ids for i in ([part] if isinstance(part, int) else part)]
    assert [c["id"] for c in family.parse(flat, tokenizer).tool_calls] == ["functions.f:1", "functions.f:2"]


@pytest.mark.parametrize(
    ("said", "content"),
    [("call_1", "<|tool_call_begin|>call_1<|tool_call_argument_begin|>{}<|tool_call_end|>"), ("functions.f:0", "")],
)
def test_an_id_that_names_no_function_is_content(said, content, tmp_path):
    family = KimiFamily(KimiConfig(version="k2"))
    tokenizer = vocabulary(family, tmp_path)
    begin, middle, end = map(
        tokenizer.special, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    )
    found = family.parse([begin, *tokenizer.encode(said), middle, *tokenizer.encode("{}"), end], tokenizer)
    assert found.content == content


def test_schemas_are_written_as_the_other_implementation_writes_them():
    theirs = pytest.importorskip("renderers.kimi_k25")._encode_tools_typescript
    schemas = [
        {},
        {"type": "object", "properties": {"b": {"type": "string", "default": "x"}, "a": {}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"enum": ["x", 1, None], "description": "which"}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "minLength": 2}}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object"}, "maxItems": 3}}},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": {"type": "number"}}}},
        {"type": "object", "properties": {"a": {"type": ["string", "array"]}, "c": True}},
        {
            "type": "object",
            "$defs": {"Item": {"type": "object", "description": "One.", "properties": {"n": {"type": "integer"}}}},
            "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
        },
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
    ]
    for schema in schemas:
        for described in ({}, {"description": "Does\n\nit."}):
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema, **described}}]
            assert declarations(tools) == theirs(tools)


@pytest.mark.parametrize("schema", [{"minimum": 1}, {"$ref": "#/other"}])
def test_a_schema_without_a_place_is_refused(schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    with pytest.raises(ValueError, match="JSON schema"):
        declarations(tools)
