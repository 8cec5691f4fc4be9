"""After every publish an embedded engine holds and serves what was trained: experts and a tied head, in bfloat16."""

from __future__ import annotations

import pytest
from miles_transport_p2p.libraries import installed
from miles_transport_p2p.transport import P2PConfig, P2PTransport

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from miles_core.testing.trained_publishes import train_and_publish  # noqa: E402

AVAILABLE = [name for name, why in installed().items() if not why]


@pytest.mark.skipif(not AVAILABLE, reason="no transfer library can be loaded")
async def test_experts_and_a_tied_head(tmp_path):
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
    transport = P2PTransport(P2PConfig(library=AVAILABLE[-1], bucket_mb=1, timeout=10.0))
    held = await train_and_publish(transport, tmp_path / "moe", tmp_path, dtype="bfloat16")
    tied = "model.embed_tokens.weight"
    assert "lm_head.weight" not in held[0]
    assert len({one[tied] for one in held}) == 3
    assert sum(".experts." in name for name in held[0]) == 2 * 6 * 3
