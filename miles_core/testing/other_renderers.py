"""The PyPI package `renderers`, which renders several of the same families, as an oracle in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.data.tokenizer import FileTokenizer

__all__ = ["as_renderer"]


class _Vocabulary:
    """What that package asks of a tokenizer, over one of ours."""

    unk_token_id = None
    name_or_path = ""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._tokenizer.added(token) or 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        known = self._tokenizer.added(text)
        return self._tokenizer.encode(text) if known is None else [known]


def as_renderer(
    name: str, options: Mapping[str, Any], tokenizer: FileTokenizer
) -> Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]:
    """A function from messages and tools to the text, generation prompt included, of the renderer `name`. Skips the
    test where the package is not installed. Tokens that a renderer looks up beside the family's are not needed."""
    import pytest

    base = pytest.importorskip("renderers.base")
    configs = pytest.importorskip("renderers.configs")
    vocabulary = _Vocabulary(tokenizer)
    config = type(configs.config_from_name(name))(**options)
    renderer = base.create_renderer(vocabulary, config)

    def text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        ids = renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True)
        return tokenizer.decode(ids)

    return text
