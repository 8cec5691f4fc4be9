"""After every publish an embedded engine holds and serves what was trained: experts and a tied head, in both dtypes."""

from __future__ import annotations

import pytest
from miles_transport_diskdelta.transport import DiskDeltaConfig, DiskDeltaTransport

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from miles_core.testing.trained_publishes import train_and_publish  # noqa: E402


@pytest.mark.parametrize(("encoding", "dtype"), [("xor", "bfloat16"), ("overwrite", "float32")])
async def test_experts_and_a_tied_head(tmp_path, encoding, dtype):
    config = transformers.Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    transport = DiskDeltaTransport(DiskDeltaConfig(encoding=encoding, threads=1))
    held = await train_and_publish(transport, tmp_path / "moe", tmp_path, dtype=dtype)
    tied = "model.embed_tokens.weight"
    assert "lm_head.weight" not in held[0]
    assert len({one[tied] for one in held}) == 3
    assert sum(".experts." in name for name in held[0]) == 2 * 6 * 3
