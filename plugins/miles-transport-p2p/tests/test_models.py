"""After every publish an embedded engine holds and serves what was trained: experts and a tied head, in bfloat16."""

from __future__ import annotations

import pytest
from miles_transport_p2p.libraries import installed
from miles_transport_p2p.transport import P2PConfig, P2PTransport

pytest.importorskip("torch")

from miles_core.testing.trained_publishes import publishes_tied_experts

AVAILABLE = [name for name, why in installed().items() if not why]


@pytest.mark.skipif(not AVAILABLE, reason="no transfer library can be loaded")
async def test_experts_and_a_tied_head(tmp_path):
    transport = P2PTransport(P2PConfig(library=AVAILABLE[-1], bucket_mb=1, timeout=10.0))
    await publishes_tied_experts(transport, tmp_path, dtype="bfloat16")
