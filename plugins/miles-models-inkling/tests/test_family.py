"""Inkling against its own reference (tml-renderers) and the package renderers."""

from __future__ import annotations

import pytest
from miles_models_inkling.family import InklingConfig, InklingFamily

from miles_core.testing.families import assert_equal, plain_conversations, vocabulary
from miles_core.testing.other_renderers import as_renderer


@pytest.mark.parametrize("effort", [0.9, 0.0])
def test_equals_the_chat_template_as_renderers_writes_it(effort, tmp_path):
    family = InklingFamily(InklingConfig(reasoning_effort=effort))
    theirs = as_renderer("inkling", {"reasoning_effort": effort}, vocabulary(family, tmp_path))
    assert_equal(family, theirs, plain_conversations(200, reasoning=True))


def test_equals_the_reference_but_for_the_opening_which_it_samples():
    pytest.importorskip("torch")
    chat = pytest.importorskip("tml_renderers.chat")
    v0 = pytest.importorskip("tml_renderers.v0")
    reference = v0.Renderer(pytest.importorskip("tml_renderers.tokenizers").O200kBaseChatTokenizer())

    def theirs(messages, tools):
        oss = []
        for message in messages:
            content = message["content"]
            if "reasoning_content" in message:
                content = [{"type": "thinking", "thinking": message["reasoning_content"]}]
                content.append({"type": "text", "text": message["content"]})
            oss.append({k: v for k, v in message.items() if k != "reasoning_content"} | {"content": content})
        native = [m for o in chat.OpenAIMessage.from_oss_messages(oss) for m in o.to_messages()]
        spans, _ = reference.render_for_completion_with_effort(native, 0.9)
        return reference.tokenizer.decode([i for s in spans for i in s.span.tokens]) + "<|message_model|>"

    def named(messages):
        return [{**m, "name": "add"} if m["role"] == "tool" else m for m in messages]

    talks = plain_conversations(100, reasoning=True)
    assert_equal(InklingFamily(InklingConfig()), theirs, ((named(messages), ()) for messages, _ in talks))


def test_a_result_bears_the_name_of_its_call():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    text = "".join(s.text for s in InklingFamily(InklingConfig()).segments(talk, add_generation_prompt=True))
    assert "<|message_model|>f<|content_invoke_tool_json|>" in text
    assert "<|message_tool|>f<|content_text|>r<|end_message|>" in text


@pytest.mark.parametrize(
    "payload", ["", "{}", '{"name":"g","args":{}}', '{"name":"f","args":[]}', '{"name":"f","args":{"x":NaN}}']
)
def test_a_broken_call_is_content(payload, tmp_path):
    family = InklingFamily(InklingConfig())
    tokenizer = vocabulary(family, tmp_path)
    invoke, end = map(tokenizer.special, ("<|content_invoke_tool_json|>", "<|end_message|>"))
    found = family.parse([*tokenizer.encode("f"), invoke, *tokenizer.encode(payload), end], tokenizer)
    assert not found.tool_calls
    assert found.content == f"f<|content_invoke_tool_json|>{payload}"
    assert found.malformed == (found.content,)
