"""In-place updates of the embedded engine: a real group, a real engine, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import EngineStart, Sampling
from miles_core.engines.embedded_launch import EmbeddedEngine, EmbeddedEngineConfig
from miles_core.engines.pool import EnginePool
from miles_core.errors import EngineRefusal
from miles_core.http import JsonHttp
from miles_core.runs.launcher import LocalLauncher
from miles_core.sync.broadcast import BroadcastConfig, BroadcastTransport
from miles_core.sync.transaction import publish
from miles_core.testing.tiny import tiny_model


def weights(model: Any, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach() * scale


async def test_a_broadcast_is_what_the_engine_serves(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    launcher, engine = LocalLauncher(ComponentConfig()), EmbeddedEngine(EmbeddedEngineConfig(threads=1, max_running=4))
    start = EngineStart(
        model_directory=tiny_model(),
        dtype="float32",
        run_directory=tmp_path,
        wait_for_weights=True,
        policy_version=0,
        environment={},
    )
    transport = BroadcastTransport(BroadcastConfig(bucket_mb=1, timeout=30.0))
    sender, receiver = transport.sender(tmp_path), transport.receiver(tmp_path)
    http = JsonHttp(deadline=10.0)
    pool = EnginePool(urls := await engine.start(launcher, start), deadline=30.0, wait_for_weights=True)
    try:
        (url,) = urls
        for path, body, reason in (
            ("/begin_weight_update", {}, "must be paused first"),
            ("/end_weight_update", {}, "no weight-update session is open"),
            ("/update_weight_version", {"new_version": "9"}, "no weights have arrived yet"),
            ("/update_weights_from_distributed", {}, "must stand between begin and end"),
        ):
            with pytest.raises(EngineRefusal, match=reason):
                await http.call("POST", url + path, body)
        for version in (1, 2):
            published = sender.send(version, weights(model, 1.0 + 0.1 * version))

            async def transfer(session: Any, published: Any = published, version: int = version) -> None:
                stream = weights(model, 1.0 + 0.1 * version)
                await asyncio.to_thread(sender.transfer, published, stream, session)

            await publish(published, receiver, pool, mode="retract", transport="broadcast", transfer=transfer)
            assert dict(await pool.checksums(url)) == published.checksums
            found = await pool.generate([5, 6, 7], Sampling(max_new_tokens=4, ignore_eos=True))
            assert found.versions.tolist() == [version] * 4
        await http.call("POST", f"{url}/pause_generation", {"mode": "retract"})
        await http.call("POST", f"{url}/begin_weight_update", {})
        with pytest.raises(EngineRefusal, match="open already"):
            await http.call("POST", f"{url}/begin_weight_update", {})
    finally:
        await pool.close()
        await http.close()
        await receiver.close()
        await engine.stop()
        await launcher.close()
        sender.close()
