"""What a model's weights come to, pipeline stage by pipeline stage: tensors, and parameters by who holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from miles_core.config.sections import Section

__all__ = ["KNOWN_MODELS", "ModelSection", "Weights", "WeightsSection"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A part of a model. Parameters are counted once, whatever holds a copy."""

    tensors: float
    """Tensors of the checkpoint: one a projection of an expert."""
    experts: float = 0.0
    """Parameters of routed experts: spread over the ranks of trainer (expert parallel) and engine."""
    split: float = 0.0
    """Parameters that tensor parallelism divides."""
    whole: float = 0.0
    """Parameters that every rank of an engine holds in full: routers, norms, low-rank down projections, indexers."""

    @property
    def parameters(self) -> float:
        """All of them."""
        return self.experts + self.split + self.whole

    def a_rank(self, ranks: int) -> float:
        """Parameters that one of the `ranks` of an engine holds."""
        return (self.experts + self.split) / ranks + self.whole

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            tensors=self.tensors + other.tensors,
            experts=self.experts + other.experts,
            split=self.split + other.split,
            whole=self.whole + other.whole,
        )


class ModelSection(Section):
    """An architecture, under the names of its Hugging Face config. Grouped-query attention, or multi-head latent
    attention where `kv_lora_rank` is given."""

    num_hidden_layers: int = Field(ge=1)
    """Transformer layers."""

    hidden_size: int = Field(ge=1)
    """Width of the residual stream."""

    vocab_size: int = Field(ge=1)
    """Rows of the embedding."""

    tie_word_embeddings: bool = False
    """Embedding and output head are one tensor."""

    intermediate_size: int = Field(default=0, ge=0)
    """Width of the MLP of a dense layer."""

    n_routed_experts: int = Field(default=0, ge=0)
    """Experts of a MoE layer; 0 for a dense model."""

    moe_intermediate_size: int = Field(default=0, ge=0)
    """Width of one expert."""

    n_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token goes through."""

    first_k_dense_replace: int = Field(default=0, ge=0)
    """First layers that are dense."""

    num_attention_heads: int = Field(ge=1)
    """Query heads."""

    num_key_value_heads: int = Field(default=0, ge=0)
    """Key and value heads of grouped-query attention; 0 for as many as query heads."""

    head_dim: int = Field(default=128, ge=1)
    """Width of a head of grouped-query attention."""

    q_lora_rank: int = Field(default=0, ge=0)
    """Latent attention: rank of the queries; 0 for one full projection."""

    kv_lora_rank: int = Field(default=0, ge=0)
    """Latent attention: rank of keys and values."""

    qk_nope_head_dim: int = Field(default=0, ge=0)
    """Latent attention: width of a head without rotary embedding."""

    qk_rope_head_dim: int = Field(default=0, ge=0)
    """Latent attention: width of a head with it."""

    v_head_dim: int = Field(default=0, ge=0)
    """Latent attention: width of a value head."""

    index_n_heads: int = Field(default=0, ge=0)
    """Heads of a sparse-attention indexer."""

    index_head_dim: int = Field(default=0, ge=0)
    """Width of one of them."""

    @model_validator(mode="before")
    @classmethod
    def _like(cls, given: Any) -> Any:
        """`like = "glm-5"` fills in what is not given."""
        if not isinstance(given, Mapping) or "like" not in given:
            return given
        name = given["like"]
        if name not in KNOWN_MODELS:
            raise ValueError(f"like = {name!r} is not known; these are: {', '.join(KNOWN_MODELS)}")
        return {**KNOWN_MODELS[name], **{key: value for key, value in given.items() if key != "like"}}

    @model_validator(mode="after")
    def _has_mlps(self) -> ModelSection:
        if self.n_routed_experts and not self.moe_intermediate_size:
            raise ValueError("n_routed_experts needs moe_intermediate_size")
        dense = self.num_hidden_layers if not self.n_routed_experts else self.first_k_dense_replace
        if dense and not self.intermediate_size:
            raise ValueError("dense layers need intermediate_size")
        return self

    def stages(self, count: int) -> list[Weights]:
        """One `Weights` a pipeline stage: layers spread evenly, the first stages one more where it does not go even;
        the embedding on the first stage, the head on the last."""
        share, extra = divmod(self.num_hidden_layers, count)
        sizes = [share + (stage < extra) for stage in range(count)]
        found, layer = [], 0
        for size in sizes:
            stage = Weights(tensors=0)
            for number in range(layer, layer + size):
                stage += self._layer(number)
            found.append(stage)
            layer += size
        table = Weights(tensors=1, split=self.vocab_size * self.hidden_size)
        found[0] += table
        found[-1] += Weights(tensors=1, whole=self.hidden_size)
        if not self.tie_word_embeddings or count > 1:
            found[-1] += table
        return found

    def _layer(self, number: int) -> Weights:
        hidden = self.hidden_size
        layer = self._attention() + Weights(tensors=2, whole=2 * hidden)
        if not self.n_routed_experts or number < self.first_k_dense_replace:
            return layer + Weights(tensors=3, split=3 * hidden * self.intermediate_size)
        expert = 3 * hidden * self.moe_intermediate_size
        layer += Weights(tensors=3 * self.n_routed_experts, experts=self.n_routed_experts * expert)
        layer += Weights(tensors=1, whole=self.n_routed_experts * hidden)
        if self.n_shared_experts:
            layer += Weights(tensors=3, split=self.n_shared_experts * expert)
        return layer

    def _attention(self) -> Weights:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if not self.kv_lora_rank:
            keys = self.num_key_value_heads or heads
            return Weights(tensors=4, split=hidden * self.head_dim * 2 * (heads + keys))
        query_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        split = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim) + heads * self.v_head_dim * hidden
        whole = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        latent = Weights(tensors=4, split=split, whole=whole)
        if self.q_lora_rank:
            rank = self.q_lora_rank
            latent += Weights(tensors=3, split=rank * heads * query_dim, whole=hidden * rank + rank)
        else:
            latent += Weights(tensors=1, split=hidden * heads * query_dim)
        if self.index_n_heads:
            width = self.index_n_heads * self.index_head_dim
            whole = (self.q_lora_rank or hidden) * width + hidden * (self.index_head_dim + self.index_n_heads)
            latent += Weights(tensors=5, whole=whole + 2 * self.index_head_dim)
        return latent


class WeightsSection(Section):
    """A model by its size alone, spread evenly; all of it divided by tensor parallelism."""

    parameters: float = Field(gt=0)
    """Parameters."""

    tensors: int = Field(ge=1)
    """Tensors of its checkpoint."""

    def stages(self, count: int) -> list[Weights]:
        """One `Weights` a pipeline stage."""
        return [Weights(tensors=self.tensors / count, split=self.parameters / count)] * count


_GLM_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_shared_experts": 1,
    "vocab_size": 154880,
}
_GLM_5 = {
    **_GLM_LATENT,
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
}

KNOWN_MODELS: Mapping[str, Mapping[str, int]] = {
    "glm-4.7-flash": {
        **_GLM_LATENT,
        "num_hidden_layers": 47,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
    },
    "glm-5-4-layers": {**_GLM_5, "num_hidden_layers": 4},
    "qwen3-30b-a3b": {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "vocab_size": 151936,
        "n_routed_experts": 128,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "glm-4.5-air": {
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
    },
    "qwen3-235b-a22b": {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "vocab_size": 151936,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
    },
    "glm-5": _GLM_5,
    "kimi-k2": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "intermediate_size": 18432,
        "n_routed_experts": 384,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
"""The models of the published figures, as their configs have them."""
