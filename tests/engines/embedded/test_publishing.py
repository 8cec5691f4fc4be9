"""After every publish the engine holds and serves what was trained: each transport, dtypes, ties, experts, adapters.

By broadcast the engine is a process; what it maps, an engine in this process maps as well, and starts in less time.
A tied head by broadcast is in `test_updates.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import EngineStart
from miles_core.engines.embedded_launch import EmbeddedEngine, EmbeddedEngineConfig
from miles_core.runs.launcher import LocalLauncher
from miles_core.sync.broadcast import BroadcastConfig, BroadcastTransport
from miles_core.sync.shared_memory import SharedMemoryTransport
from miles_core.testing.trained_publishes import engine_here, train_and_publish

ADAPTED = ("q_proj", "down_proj")
LORA = {"lora": {"rank": 2, "targets": ADAPTED}}


@contextlib.asynccontextmanager
async def engine_process(directory: Path, dtype: str) -> AsyncIterator[list[str]]:
    launcher, engine = LocalLauncher(ComponentConfig()), EmbeddedEngine(EmbeddedEngineConfig(threads=1, max_running=4))
    start = EngineStart(
        model_directory=directory,
        dtype=dtype,
        run_directory=directory.parent,
        wait_for_weights=True,
        policy_version=0,
        environment={},
    )
    try:
        yield list(await engine.start(launcher, start))
    finally:
        await engine.stop()
        await launcher.close()


@pytest.mark.parametrize(
    ("transport", "family", "dtype", "backend"),
    [
        pytest.param("shared_memory", "llama", "bfloat16", {}, id="shared_memory-tied-bfloat16"),
        pytest.param("shared_memory", "llama", "float32", LORA, id="shared_memory-adapters-float32"),
        pytest.param("shared_memory", "qwen3_moe", "float32", {}, id="shared_memory-experts-float32"),
        pytest.param("broadcast", "llama", "float32", LORA, id="broadcast-adapters-float32"),
        pytest.param("broadcast", "qwen3_moe", "bfloat16", {}, id="broadcast-experts-bfloat16"),
    ],
)
async def test_the_engine_holds_and_serves_what_was_trained(
    model_directory: Callable[[str], Path],
    tmp_path: Path,
    transport: str,
    family: str,
    dtype: str,
    backend: dict[str, Any],
) -> None:
    if backend:
        pytest.importorskip("peft")
    directory = model_directory(family)
    if transport == "broadcast":
        broadcast = BroadcastTransport(BroadcastConfig(bucket_mb=1, timeout=60.0))
        held = await train_and_publish(
            broadcast, directory, tmp_path, dtype=dtype, backend=backend, serving=engine_process
        )
    else:
        shared = SharedMemoryTransport(ComponentConfig())
        held = await train_and_publish(shared, directory, tmp_path, dtype=dtype, backend=backend, serving=engine_here)
    names = set(held[0])
    assert ("lm_head.weight" in names) is (family == "qwen3_moe"), "a tied head travels with its embedding"
    adapted = {name for name in names if name.split(".")[-2] in ADAPTED}
    for before, after in pairwise(held):
        changed = {name for name in names if before[name] != after[name]}
        assert changed == adapted if backend else "model.embed_tokens.weight" in changed
    if family == "qwen3_moe":
        assert sum(".experts." in name for name in names) == 2 * 6 * 3, "a name for each projection of an expert"
