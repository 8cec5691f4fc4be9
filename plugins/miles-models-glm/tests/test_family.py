"""GLM against its official template (trl) and other implementations (renderers), and what a session does with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from miles_models_glm.family import GlmConfig, GlmFamily
from pydantic import ValidationError

from miles_core.testing.families import assert_equal, plain_conversations, vocabulary
from miles_core.testing.other_renderers import as_renderer
from miles_core.tito.official import OfficialTemplate


@pytest.mark.parametrize(("thinking", "reasoning", "turns"), [(True, False, 3), (True, True, 1), (False, False, 3)])
def test_4_5_equals_the_official_template_where_that_is_append_only(thinking, reasoning, turns):
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the trl wheel, which carries the official template, is not installed")
    source = (Path(spec.origin).parent / "chat_templates" / "glm4moe.jinja").read_text(encoding="utf-8")
    official = OfficialTemplate(source, "glm4moe", {} if thinking else {"enable_thinking": False})
    assert_equal(
        GlmFamily(GlmConfig(version="4.5", thinking=thinking)),
        lambda messages, tools: official.text(messages, tools, generate=True),
        plain_conversations(300, reasoning=reasoning, turns=turns),
    )


@pytest.mark.parametrize(
    ("version", "renderer", "thinking"),
    [("4.7", "glm-5", True), ("4.7", "glm-5", False), ("5", "glm-5", True), ("5.1", "glm-5.1", True)],
)
def test_later_ones_equal_the_package_renderers(version, renderer, thinking, tmp_path):
    family = GlmFamily(GlmConfig(version=version, thinking=thinking))
    options = {"clear_thinking": False} if thinking else {"enable_thinking": False}
    theirs = as_renderer(renderer, options, vocabulary(family, tmp_path))
    assert_equal(family, theirs, plain_conversations(200, reasoning=thinking))


def test_5_2_says_the_effort_and_keeps_white_space():
    family = GlmFamily(GlmConfig(version="5.2", reasoning_effort="high"))
    reply = {"role": "assistant", "content": " A ", "reasoning_content": " R\n"}
    segments = family.segments([{"role": "user", "content": "hi"}, reply, {"role": "user", "content": "b"}])
    assert "".join(s.text for s in segments) == (
        "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>hi<|assistant|><think> R\n</think>A<|user|>b"
    )


@pytest.mark.parametrize(
    ("said", "drop", "kept"),
    [
        (["</think>", "A", "<|user|>"], 1, 2),
        (["</think>", "A", "<|observation|>"], 1, 2),
        (["</think>", "A", "<|endoftext|>"], 0, 3),
        (["</think>", "A"], 0, 2),
    ],
)
def test_the_junction_drops_a_sampled_role(said, drop, kept, tmp_path):
    family = GlmFamily(GlmConfig(version="4.7"))
    tokenizer = vocabulary(family, tmp_path)
    ids = [i for name in said for i in ([tokenizer.special(name)] if name[0] == "<" else tokenizer.encode(name))]
    assert family.junction(ids, tokenizer) == (drop, [])
    assert len(ids) - drop == kept
    assert family.parse(ids, tokenizer).content == "A"


def test_numbers_and_texts_are_told_apart_by_the_schema(tmp_path):
    family = GlmFamily(GlmConfig(version="4.7"))
    tokenizer = vocabulary(family, tmp_path)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"n": 1, "s": "1"}'}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    ids = family.render([reply], tokenizer, tools=tools)[2:]
    start = ids.index(tokenizer.special("<tool_call>"))
    found = family.parse([tokenizer.special("</think>"), *ids[start:]], tokenizer, tools=tools)
    assert found.tool_calls == (call,)


def test_a_broken_call_is_content_and_does_not_hide_the_next(tmp_path):
    family = GlmFamily(GlmConfig(version="4.7"))
    tokenizer = vocabulary(family, tmp_path)
    names = ["</think>", "<tool_call>", "f", "<arg_key>", "<tool_call>", "g", "</tool_call>", "<|observation|>"]
    ids = [i for name in names for i in ([tokenizer.special(name)] if name[0] == "<" else tokenizer.encode(name))]
    found = family.parse(ids, tokenizer)
    assert found.content == "<tool_call>f<arg_key>"
    assert found.malformed == ("<tool_call>f<arg_key>",)
    assert [call["function"]["name"] for call in found.tool_calls] == ["g"]


@pytest.mark.parametrize("way", [{"version": "5.2", "thinking": False}, {"version": "5", "reasoning_effort": "high"}])
def test_what_a_version_has_not_is_refused(way):
    with pytest.raises(ValidationError, match="leave it out"):
        GlmConfig(**way)
