"""A small byte-level tokenizer whose merges reach over the places where messages meet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from miles_core.data.tokenizer import FileTokenizer, load_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# ">\n", "\n\n", "\n<": tokenising two messages' ends together is seen in the ids.
MERGES = (
    ("Ċ", "Ċ"),
    (">", "Ċ"),
    ("Ċ", "<"),
    ("u", "s"),
    ("us", "e"),
    ("use", "r"),
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
)


def write_tokenizer(directory: Path, *, tags: bool, chat_template: str | None = None) -> Path:
    """`tags`: the tool-call tags are added tokens, as in Qwen's vocabularies, instead of text, as in SmolLM2's."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in SPECIAL])
    if tags:
        tokenizer.add_tokens([AddedToken(name) for name in TAGS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session", params=[False, True], ids=["tags-are-text", "tags-are-tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), tags=request.param))


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Path]:
    """`write_tokenizer`, for tests that choose the directory and the chat template."""
    return write_tokenizer
