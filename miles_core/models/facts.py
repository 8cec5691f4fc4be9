"""What of a model directory the controller has to know, from its config.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import orjson

from miles_core.errors import ModelError

__all__ = ["ModelFacts", "model_facts"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """`vocabulary`: ids are below it. `experts_per_token`: routed experts of each token and layer; 0 without any."""

    vocabulary: int
    experts_per_token: int


def model_facts(directory: Path) -> ModelFacts:
    """Read them. Raises `ModelError` when the config does not say how large the vocabulary is."""
    config = orjson.loads((directory / "config.json").read_bytes())
    text = config.get("text_config") or config
    vocabulary = text.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise ModelError(f"{directory / 'config.json'}: vocab_size is {vocabulary!r}, expected the number of token ids")
    return ModelFacts(vocabulary=vocabulary, experts_per_token=int(text.get("num_experts_per_tok") or 0))
