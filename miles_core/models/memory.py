"""Memory of a training or generating process, from config.json and safetensors headers alone."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from miles_core.errors import ModelError

__all__ = ["MemoryEstimate", "memory_estimate", "parameter_count", "read_config"]

_LIVE_LOGIT_TOKENS = 256  # tokens whose logits exist at one time: `training.logprobs.CHUNK`
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose, for one process."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def read_config(directory: Path) -> Mapping[str, Any]:
    """config.json of a model directory, with the text part lifted out of a multimodal one."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model directory {directory}: cannot read config.json: {error}") from error
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def parameter_count(directory: Path) -> int:
    """Parameters stored in the safetensors files (a tied output projection counts once)."""
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    if total == 0:
        raise ModelError(f"model directory {directory}: no weights in *.safetensors")
    return total


def memory_estimate(
    directory: Path,
    *,
    role: Literal["train", "generate"],
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    tokens: int,
    shards: int = 1,
    checkpointing: bool = False,
) -> MemoryEstimate:
    """Bytes one process needs. `tokens` is the micro-batch budget (train) or the cache's capacity (generate).

    Training keeps master weights, gradients and two Adam moments in float32, divided over `shards`, and a low
    precision copy of the weights when `dtype` is one. Activations per token and layer of a pre-norm transformer with
    a gated MLP, without attention scores (they are recomputed): Korthikanti et al., arXiv 2205.05198, adapted.
    """
    config = read_config(directory)
    parameters = parameter_count(directory)
    size = _BYTES[dtype]
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    intermediate = int(config.get("intermediate_size") or 4 * hidden)
    if role == "generate":
        kv_cache = 2 * layers * kv_heads * head_dim * size * tokens
        return MemoryEstimate(
            weights=parameters * size, gradients=0, optimizer=0, activations=0, logits=0, kv_cache=kv_cache
        )
    copy = parameters * size if dtype != "float32" else 0
    per_layer = 6 * hidden + 2 * (heads + kv_heads) * head_dim + 4 * intermediate
    per_token = layers * hidden + per_layer if checkpointing else layers * per_layer
    return MemoryEstimate(
        weights=parameters * 4 // shards + copy,
        gradients=parameters * 4 // shards,
        optimizer=parameters * 8 // shards,
        activations=tokens * per_token * size,
        logits=3 * min(tokens, _LIVE_LOGIT_TOKENS) * int(config["vocab_size"]) * 4,
        kv_cache=0,
    )
