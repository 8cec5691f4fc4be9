"""The PyPI package `renderers`, which renders several of the same families, as an oracle in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.data.tokenizer import FileTokenizer

__all__ = ["as_renderer", "renderer_over"]


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


def renderer_over(name: str, options: Mapping[str, Any], tokenizer: FileTokenizer) -> Any:
    """The renderer `name` over one of our tokenizers. Raises `ImportError` where the package is not installed."""
    from renderers.base import create_renderer
    from renderers.configs import config_from_name

    return create_renderer(_Vocabulary(tokenizer), type(config_from_name(name))(**options))


def as_renderer(
    name: str, options: Mapping[str, Any], tokenizer: FileTokenizer
) -> Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]:
    """A function from messages and tools to the text, generation prompt included, of the renderer `name`. Skips the
    test where the package is not installed. Tokens that a renderer looks up beside the family's are not needed."""
    import pytest

    pytest.importorskip("renderers.base")
    renderer = renderer_over(name, options, tokenizer)

    def text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        ids = renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True)
        return tokenizer.decode(ids)

    return text
