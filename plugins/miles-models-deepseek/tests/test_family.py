"""DeepSeek against its own encoders, and what a version has no place for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from miles_models_deepseek.family import DeepSeekConfig, DeepSeekFamily

from miles_core.testing.families import assert_equal, plain_conversations

QUESTION = {"role": "user", "content": "q"}


@pytest.mark.parametrize(("thinking", "turns"), [(False, 3), (True, 1)])
def test_v4_equals_the_reference_encoder(thinking, turns):
    recipe = pytest.importorskip("deepseek_recipe")
    encoding, options = recipe.DeepseekV4Encoding(), recipe.ConversionOptions()

    def theirs(messages, tools):
        body = {"model": "DeepSeek-V4-Pro", "messages": messages, "thinking": {"type": "disabled"}}
        if thinking:
            body |= {"thinking": {"type": "enabled"}, "reasoning_effort": "low"}
        if tools:
            body["tools"] = list(tools)
        return encoding.render_conversation(recipe.ChatCompletionRequest(body).convert(options).conversation).prompt

    family = DeepSeekFamily(DeepSeekConfig(version="4", thinking=thinking))
    assert_equal(family, theirs, plain_conversations(300, reasoning=thinking, turns=turns))


@pytest.mark.parametrize(("thinking", "turns"), [(False, 3), (True, 1)])
def test_v3_2_equals_the_published_encoder_which_sglang_carries(thinking, turns):
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or sglang.origin is None:
        pytest.skip("SGLang, which carries encoding_dsv32.py, is not installed")
    path = Path(sglang.origin).parent / "srt" / "entrypoints" / "openai" / "encoding_dsv32.py"
    spec = importlib.util.spec_from_file_location("encoding_dsv32", path)
    assert spec is not None
    assert spec.loader is not None
    encoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encoder)

    def theirs(messages, tools):
        given = [dict(message) for message in messages]
        if tools:
            given = given if given[0]["role"] == "system" else [{"role": "system", "content": ""}, *given]
            given[0]["tools"] = tools
        return encoder.encode_messages(given, "thinking" if thinking else "chat")

    family = DeepSeekFamily(DeepSeekConfig(version="3.2", thinking=thinking))
    assert_equal(family, theirs, plain_conversations(300, reasoning=thinking, turns=turns))


def test_v3_1_writes_a_call_and_its_result():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [{"role": "system", "content": "S"}, QUESTION, {"role": "assistant", "content": "A", "tool_calls": [call]}]
    talk += [{"role": "tool", "content": "r"}, {"role": "assistant", "content": "B"}, QUESTION]
    segments = DeepSeekFamily(DeepSeekConfig(version="3.1")).segments(talk, add_generation_prompt=True)
    assert "".join(s.text for s in segments) == (
        "<｜begin▁of▁sentence｜>S<｜User｜>q<｜Assistant｜></think>A"
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        "<｜end▁of▁sentence｜><｜tool▁output▁begin｜>r<｜tool▁output▁end｜>B<｜end▁of▁sentence｜>"
        "<｜User｜>q<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("config", "messages", "tools", "says"),
    [
        ({"version": "3.1"}, [QUESTION], [{"type": "function", "function": {"name": "f"}}], "no place for them"),
        ({"version": "3.1", "thinking": True}, [QUESTION, {"role": "tool", "content": "r"}], [], "without thinking"),
        ({"version": "4"}, [QUESTION, {"role": "system", "content": "s"}], [], "first message"),
        ({"version": "4"}, [QUESTION, {"role": "assistant", "content": "", "reasoning_content": "r"}], [], "leave it"),
    ],
)
def test_what_a_version_has_not_is_refused(config, messages, tools, says):
    family = DeepSeekFamily(DeepSeekConfig(**config))
    with pytest.raises(ValueError, match=says):
        family.segments(messages, tools=tools, add_generation_prompt=True)
