"""Qwen3 against its official templates (read from the trl wheel), and the laws of a family with thinking."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.contracts.families import ParsedReply
from miles_core.data.segments import encode_segments
from miles_core.data.tokenizer import FileTokenizer
from miles_core.tito.families.qwen3 import Qwen3Config, Qwen3Family
from miles_core.tito.families.template import compile_template

THINKING = ["free", "off", "forced", "none"]
FAMILIES = {name: Qwen3Family(Qwen3Config(thinking=name)) for name in THINKING}  # type: ignore[arg-type]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é <b>", "parameters": {"type": "object"}}}]
SPELLS = ["<|im_end|>", "<tool_call>", "hello", "\n", "中", "{", " x", "<think>"]
texts = st.lists(st.sampled_from(SPELLS) | st.text(max_size=3), max_size=4).map("".join)
calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["add", "files.read"]),
    st.sampled_from(["{}", '{"a": 1.0}', '{"s":"é \\n"}']),
)


def replies(thinking: str) -> st.SearchStrategy[dict[str, Any]]:
    reasoned = thinking in ("free", "forced")
    return st.builds(
        lambda content, reasoning, made: {
            "role": "assistant",
            "content": content,
            **({"reasoning_content": reasoning} if reasoning is not None and reasoned else {}),
            **({"tool_calls": made} if made else {}),
        },
        texts,
        st.none() | texts,
        st.lists(calls, max_size=2),
    )


def conversations(thinking: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    said = st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool", "system"]), texts
    )
    return st.lists(said | replies(thinking), min_size=1, max_size=6)


@pytest.mark.parametrize("thinking", THINKING)
def test_append_only_at_every_cut_and_suffix_alone_is_enough(tokenizer: FileTokenizer, thinking: str):
    family = FAMILIES[thinking]

    @settings(max_examples=60, deadline=None)
    @given(messages=conversations(thinking), tools=st.sampled_from([[], TOOLS]))
    def law(messages: list[dict[str, Any]], tools: list[Any]) -> None:
        whole = family.render(messages, tokenizer, tools=tools, add_generation_prompt=True)
        for cut in range(1, len(messages)):
            asks = messages[cut]["role"] == "assistant"
            part = family.render(messages[:cut], tokenizer, tools=tools, add_generation_prompt=asks)
            assert whole[: len(part)] == part
            if messages[cut - 1]["role"] == "assistant":
                held = family.render(messages[:cut], tokenizer, tools=tools)
                rest = encode_segments(family.suffix(messages, after=cut - 1, tools=tools), tokenizer)[0]
                assert whole == [*held, *rest]

    law()


@pytest.mark.parametrize("thinking", THINKING)
def test_parse_inverts_render_and_streams_are_prefixes(tokenizer: FileTokenizer, thinking: str):
    family = FAMILIES[thinking]

    @settings(max_examples=80, deadline=None)
    @given(reply=replies(thinking))
    def law(reply: Mapping[str, Any]) -> None:
        message = family.parse(sampled(family, tokenizer, reply), tokenizer).as_message()  # what a model can emit
        ids = sampled(family, tokenizer, message)
        parsed = family.parse(ids, tokenizer)
        assert parsed.as_message() == message
        for count in range(len(ids)):
            partial = family.partial(ids[:count], tokenizer)
            assert parsed.content.startswith(partial.content)
            assert (parsed.reasoning or "").startswith(partial.reasoning or "")

    law()


def sampled(family: Qwen3Family, tokenizer: FileTokenizer, message: Mapping[str, Any]) -> list[int]:
    segments = [s for s in family.segments([message]) if s.sampled]
    return encode_segments(segments, tokenizer)[0]


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("free", "<think>\nR\n</think>\n\nA", ParsedReply(content="A", reasoning="R")),
        ("free", "A", ParsedReply(content="A")),
        ("free", "<think>\nunfinished", ParsedReply(content="", reasoning="unfinished")),
        ("forced", "R\n</think>\n\nA", ParsedReply(content="A", reasoning="R")),
        ("forced", "unfinished", ParsedReply(content="", reasoning="unfinished")),
        ("off", "A</think>", ParsedReply(content="A</think>")),
    ],
)
def test_replies_are_read(thinking: str, text: str, expected: ParsedReply):
    assert FAMILIES[thinking].parse_text(text) == expected


@pytest.mark.parametrize("thinking", ["off", "none"])
def test_thinking_that_has_no_place_is_refused(thinking: str):
    with pytest.raises(ValueError, match="reasoning_content, but with thinking"):
        FAMILIES[thinking].segments([{"role": "assistant", "content": "x", "reasoning_content": "y"}])


def official(name: str) -> Any:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the trl wheel, which carries the official templates, is not installed")
    path = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
    return compile_template(path.read_text(encoding="utf-8"), name)


@pytest.mark.parametrize(
    ("thinking", "template", "arguments"),
    [
        ("free", "qwen3", {}),
        ("none", "qwen3_instruct_2507", {}),
    ],
)
def test_equals_the_official_template_where_that_is_append_only(
    thinking: str, template: str, arguments: dict[str, Any]
):
    """As text: both write the same tokens where no text spells one, which the plain words here do not."""
    family, rendered = FAMILIES[thinking], official(template).render
    plain = st.lists(st.sampled_from(["hello", " world", "12", "a\nb", ".", "é"]), min_size=1, max_size=3).map("".join)
    arguments_ = st.sampled_from(["{}", '{"a": 1}'])
    call = st.builds(lambda a: {"type": "function", "function": {"name": "add", "arguments": a}}, arguments_)
    turn = st.tuples(plain, plain, st.none() | plain, st.lists(call, max_size=2), st.lists(plain, max_size=2))
    compared = 0

    @settings(max_examples=150, deadline=None)
    @given(turns=st.lists(turn, min_size=1, max_size=3), system=st.none() | plain, tools=st.sampled_from([[], TOOLS]))
    def law(turns: list[Any], system: str | None, tools: list[Any]) -> None:
        nonlocal compared
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for question, answer, reasoning, made, results in turns:
            messages.append({"role": "user", "content": question})
            reply: dict[str, Any] = {"role": "assistant", "content": answer}
            if reasoning is not None and thinking == "free":
                reply["reasoning_content"] = reasoning
            if made:
                reply["tool_calls"] = made
            messages += [reply, *({"role": "tool", "content": r} for r in results if made)]
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": "more"})  # a template may still change a last answer
        for cut in range(1, len(messages) + 1):
            generate = cut == len(messages) or messages[cut]["role"] == "assistant"
            theirs = rendered(messages=messages[:cut], tools=tools or None, add_generation_prompt=generate, **arguments)
            whole = rendered(messages=messages, tools=tools or None, add_generation_prompt=True, **arguments)
            if messages[cut - 1]["role"] == "assistant" and not messages[cut - 1].get("reasoning_content"):
                theirs = theirs.replace("<think>\n\n</think>\n\n", "")  # written on a last answer alone
            if not whole.startswith(theirs):
                return  # the official template is not append-only on this conversation
        ours = "".join(s.text for s in family.segments(messages, tools=tools, add_generation_prompt=True))
        assert ours == whole
        compared += 1

    law()
    assert compared >= 20
