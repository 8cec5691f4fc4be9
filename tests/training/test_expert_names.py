"""A model with experts is published, and exported, under one name an expert, as its checkpoint has them."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


def test_weights_are_named_as_in_the_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from miles_core.training.scorer import load_scorer
    from miles_core.training.weights import named_weights, save_pretrained

    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    checkpoint = load_file(tmp_path / "model" / "model.safetensors")
    scorer = load_scorer(tmp_path / "model", dtype="float32", temperature=1.0)
    weights = dict(named_weights(scorer))
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in weights
    assert weights.keys() == checkpoint.keys()
    assert all(torch.equal(weights[name], checkpoint[name]) for name in checkpoint)
    save_pretrained(scorer.model, weights, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == checkpoint.keys()
    assert all(torch.equal(exported[name], checkpoint[name]) for name in checkpoint)
