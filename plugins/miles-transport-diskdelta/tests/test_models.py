"""After every publish an embedded engine holds and serves what was trained: experts and a tied head, in both dtypes."""

from __future__ import annotations

import pytest
from miles_transport_diskdelta.transport import DiskDeltaConfig, DiskDeltaTransport

pytest.importorskip("torch")

from miles_core.testing.trained_publishes import publishes_tied_experts


@pytest.mark.parametrize(("encoding", "dtype"), [("xor", "bfloat16"), ("overwrite", "float32")])
async def test_experts_and_a_tied_head(tmp_path, encoding, dtype):
    transport = DiskDeltaTransport(DiskDeltaConfig(encoding=encoding, threads=1))
    await publishes_tied_experts(transport, tmp_path, dtype=dtype)
