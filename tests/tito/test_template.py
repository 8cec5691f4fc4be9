"""The best-effort family: what it makes of templates that are append-only, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data.segments import encode_segments
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.errors import ModelError
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.families.template import TemplateConfig, TemplateFamily

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])")
texts = st.lists(st.sampled_from(["hello", "<|im_end|>", "<|im_start|>", "\n", ">", "\ue000", "中"]), max_size=4).map(
    "".join
)


Loaded = tuple[TemplateFamily, FileTokenizer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[..., Path]) -> Callable[..., Loaded]:
    def load(chat_template: str | None, **options: object) -> Loaded:
        directory = make_tokenizer(tmp_path_factory.mktemp("template"), tags=True, chat_template=chat_template)
        return TemplateFamily(TemplateConfig(directory=str(directory), **options)), load_tokenizer(directory)

    return load


@pytest.fixture(scope="module")
def loaded(load: Callable[..., Loaded]) -> Loaded:
    return load(CHATML)


@settings(max_examples=60, deadline=None)
@given(chat=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), min_size=1, max_size=4))
def test_equals_the_written_family(loaded: Loaded, chat: list[tuple[str, str]]):
    family, tokenizer = loaded
    written = ChatMLFamily(ChatMLConfig())
    messages = [{"role": role, "content": text} for role, text in chat]
    for generate in (False, True):
        ours = encode_segments(family.segments(messages, add_generation_prompt=generate), tokenizer)
        assert ours == encode_segments(written.segments(messages, add_generation_prompt=generate), tokenizer)


def test_junction_is_read_off_the_template(loaded: Loaded):
    family, tokenizer = loaded
    written = ChatMLFamily(ChatMLConfig())
    end = tokenizer.special("<|im_end|>")
    for sampled in ([7, end], [7], []):
        assert family.junction(sampled, tokenizer) == written.junction(sampled, tokenizer)


def test_template_that_changes_history_is_refused_where_it_does(load: Callable[..., Loaded]):
    family, _ = load(FORGETFUL)
    messages = [
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "<think>R1</think>ANSWER1"},
    ]
    family.segments(messages)
    with pytest.raises(
        ValueError, match=r"message 2 \(user\): the chat template of .* tokens already sampled would change"
    ):
        family.segments([*messages, {"role": "user", "content": "U2"}])


def test_template_that_refuses_is_quoted(load: Callable[..., Loaded]):
    family, _ = load("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses 1 messages: roles must alternate"):
        family.segments([{"role": "user", "content": "x"}])


def test_template_is_sandboxed(load: Callable[..., Loaded]):
    family, _ = load("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="unsafe"):
        family.segments([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "options", "reason"),
    [
        (None, {}, "no chat template 'default'; it has none"),
        ("{% if %}", {}, "line 1"),
        (CHATML, {"template": "rag"}, "it has default"),
    ],
)
def test_missing_and_broken_templates(
    load: Callable[..., Loaded], template: str | None, options: dict[str, str], reason: str
):
    family, _ = load(template, **options)
    with pytest.raises(ModelError, match=reason):
        family.segments([{"role": "user", "content": "x"}])


def test_stop_token_that_the_template_never_writes(load: Callable[..., Loaded]):
    family, tokenizer = load(CHATML, stop=("<|endoftext|>",))
    with pytest.raises(ModelError, match="without any of the stop tokens"):
        family.junction([1], tokenizer)


def test_parser_by_name(load: Callable[..., Loaded]):
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    family, tokenizer = load(CHATML, parser="hermes")
    ids = [*tokenizer.encode(text), tokenizer.special("<|im_end|>")]
    assert [call["function"]["name"] for call in family.parse(ids, tokenizer).tool_calls] == ["add"]
    plain = TemplateFamily(family.config.model_copy(update={"parser": "text"}))
    assert plain.parse(ids, tokenizer).content == text
