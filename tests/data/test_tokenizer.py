"""Text stays text, tokens are asked for by name, and decoding gives back what was encoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.errors import ModelError

SPECIAL, ADDED = "<|im_end|>", "<tool_call>"


def write(directory: Path, *, ignore_merges: bool = False, in_model: bool = False, **config: object) -> Path:
    """A byte-level BPE tokenizer with one special and one other added token, which adds a token of its own."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    if in_model:
        pieces = [SPECIAL, ADDED, *pieces]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], ignore_merges=ignore_merges)
    )
    if not ignore_merges:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL)])
    tokenizer.add_tokens([AddedToken(ADDED), AddedToken("    ")])
    end = tokenizer.token_to_id(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, end)])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL, **config}))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("in_model", [False, True])
@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("text", [SPECIAL, ADDED, f"a{SPECIAL}b {ADDED}"])
def test_text_that_spells_a_token_stays_text(tmp_path: Path, ignore_merges: bool, in_model: bool, text: str):
    tokenizer = load_tokenizer(write(tmp_path, ignore_merges=ignore_merges, in_model=in_model))
    ids = tokenizer.encode(text)
    assert {tokenizer.special(SPECIAL), tokenizer.special(ADDED)}.isdisjoint(ids)
    # Without a pre-tokeniser a space is no letter of the byte alphabet.
    assert tokenizer.decode(ids) == (text if not ignore_merges else text.replace(" ", ""))


@settings(max_examples=200, deadline=None)
@given(st.text().map(lambda text: text.replace("\ud800", "")) | st.sampled_from([SPECIAL, f"x{ADDED}{SPECIAL}"]))
def test_decode_inverts_encode_and_no_token_is_added(tokenizer: FileTokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.added_tokens.values())


def test_runs_of_spaces_that_are_added_tokens_are_text(tokenizer: FileTokenizer):
    assert len(tokenizer.encode("    ")) == 1


def test_tokens_are_found_by_name_special_or_not(tokenizer: FileTokenizer):
    assert tokenizer.decode([tokenizer.special(SPECIAL)]) == SPECIAL
    assert tokenizer.decode([tokenizer.special(ADDED)], skip_special=True) == ADDED
    assert tokenizer.decode([tokenizer.special(SPECIAL)], skip_special=True) == ""
    assert tokenizer.added("<nothing>") is None
    with pytest.raises(ModelError, match="no added token '<nothing>'; it has"):
        tokenizer.special("<nothing>")


def test_eos_and_sizes(tokenizer: FileTokenizer):
    assert tokenizer.eos_id == tokenizer.special(SPECIAL)
    assert tokenizer.vocab_size == 256 + 3
    assert tokenizer.special_names == {SPECIAL}


def test_ids_beyond_the_vocabulary_are_shown_and_negative_ones_refused(tokenizer: FileTokenizer):
    assert tokenizer.decode([*tokenizer.encode("ab"), 10_000, *tokenizer.encode("c")]) == "ab\ufffdc"
    with pytest.raises(ModelError, match="negative"):
        tokenizer.decode([-1])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"chat_template": "plain"}, {"default": "plain"}),
        (
            {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]},
            {"default": "a", "rag": "b"},
        ),
        ({}, {}),
    ],
)
def test_chat_templates_of_the_config(tmp_path: Path, config: dict[str, object], expected: dict[str, str]):
    assert load_tokenizer(write(tmp_path, **config)).chat_templates == expected


def test_template_file_wins_over_the_config(tmp_path: Path):
    write(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(tmp_path).chat_template == "new"


def test_added_tokens_of_the_config_alone(tmp_path: Path):
    free = 256 + 3
    write(tmp_path, added_tokens_decoder={str(free): {"content": "<think>", "special": False}})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special("<think>") == free
    assert free not in tokenizer.encode("<think>")


def test_added_token_with_another_id_is_refused(tmp_path: Path):
    write(tmp_path, added_tokens_decoder={"7000": {"content": "<think>"}})
    with pytest.raises(ModelError, match="do not belong together"):
        load_tokenizer(tmp_path)


def test_eos_written_as_an_object(tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path, eos_token={"content": SPECIAL, "lstrip": False}))
    assert tokenizer.eos_id == tokenizer.special(SPECIAL)


def test_unknown_token_is_an_error_and_no_token_of_the_text(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("a a") == [1, 1]
    with pytest.raises(ModelError, match=r"tokenises to the added token '\[UNK\]'"):
        loaded.encode("b")


def test_missing_and_damaged_files(tmp_path: Path):
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read it"):
        load_tokenizer(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json: not JSON"):
        load_tokenizer(tmp_path)
