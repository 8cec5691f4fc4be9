"""The `sglang` engine without SGLang: its config, its command line, its process, its witness."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import EngineStart, Sampling
from miles_core.engines.pool import EnginePool
from miles_core.engines.sglang import SglangConfig, SglangEngine, server_command
from miles_core.engines.wire import parse_generation
from miles_core.errors import EngineError, EngineRefusal, EngineUnavailable, EnvironmentFailure, PublishError
from miles_core.http import Retryable
from miles_core.runs.launcher import LocalLauncher
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

SERVER = """
import http.server, sys, threading, os
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
print("a line that is no JSON", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start(directory: Path, *, wait_for_weights: bool = True) -> EngineStart:
    return EngineStart(
        model_directory=directory,
        dtype="float32",
        run_directory=directory,
        wait_for_weights=wait_for_weights,
        policy_version=7,
        environment={},
    )


@pytest.mark.parametrize("settings", [{}, {"urls": ("http://a",), "python": "p"}])
def test_exactly_one_way_to_servers(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one of urls, python and command"):
        SglangConfig(**settings)


def test_the_command_line(tmp_path: Path) -> None:
    config = SglangConfig(python="py", device="cpu", arguments=("--tp-size", "1"))
    command = server_command(config, start(tmp_path), 99)
    assert command[:3] == ["py", "-m", "sglang.launch_server"]
    assert command[command.index("--port") + 1] == "99"
    assert command[command.index("--weight-version") + 1] == "unpublished"
    assert command[-2:] == ["--tp-size", "1"]
    published = server_command(config, start(tmp_path, wait_for_weights=False), 99)
    assert published[published.index("--weight-version") + 1] == "7"


async def test_a_server_is_launched_ended_and_started_again(tmp_path: Path) -> None:
    launcher = LocalLauncher(ComponentConfig())
    engine = SglangEngine(SglangConfig(command=(sys.executable, "-c", SERVER), ready_timeout=30.0, restarts=1))
    try:
        (url,) = await engine.start(launcher, start(tmp_path))
        process = engine._launched.servers[0].process
        assert process is not None
        import os
        import signal

        os.killpg(int(str(process.ready["pid"])), signal.SIGKILL)
        restarts = engine.restarts()
        assert await asyncio.wait_for(anext(restarts), 30.0) == url
        again = engine._launched.servers[0].process
        assert again is not None
        os.killpg(int(str(again.ready["pid"])), signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match=r"engine\.restarts = 1 allows no further start"):
            await asyncio.wait_for(anext(restarts), 30.0)
    finally:
        await engine.stop()
        await launcher.close()


async def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    launcher = LocalLauncher(ComponentConfig())
    failing = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    engine = SglangEngine(SglangConfig(command=(sys.executable, "-c", failing), ready_timeout=30.0))
    with pytest.raises(EnvironmentFailure, match=r"(?s)ended with status.*no such model.*ended with status 3"):
        await engine.start(launcher, start(tmp_path))
    await launcher.close()


async def test_a_url_that_does_not_answer() -> None:
    engine = SglangEngine(SglangConfig(urls=("http://127.0.0.1:9",), ready_timeout=0.3))
    with pytest.raises(EngineError, match=r"engine\.urls: http://127\.0\.0\.1:9 does not answer /health"):
        await engine.start(LocalLauncher(ComponentConfig()), start(Path()))


async def test_nothing_is_routed_to_an_engine_before_it_is_admitted() -> None:
    async with stub_engine(StubEngine(hashed_script(10, 2))) as url:
        pool = EnginePool([url], deadline=0.3, wait_for_weights=True)
        try:
            with pytest.raises(EngineUnavailable, match="it holds no published version yet"):
                await pool.generate([1], Sampling(max_new_tokens=1))
            pool.admit(url, 0)
            assert len((await pool.generate([1], Sampling(max_new_tokens=1))).token_ids) == 1
        finally:
            await pool.close()


async def test_an_id_outside_the_vocabulary_is_not_sent() -> None:
    engine = StubEngine(hashed_script(10, 2))
    async with stub_engine(engine) as url:
        pool = EnginePool([url], vocabulary=10)
        try:
            with pytest.raises(EngineRefusal, match=r"input_ids\[1\] is 10, outside the vocabulary \(0 to 9\)"):
                await pool.generate([1, 10], Sampling(max_new_tokens=1))
        finally:
            await pool.close()
    assert engine.requests == []


def test_a_version_that_was_never_published_is_no_sample() -> None:
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 1,
        "output_token_logprobs": [[-1.0, 5, None]],
        "weight_version": "default",
    }
    with pytest.raises(Retryable, match="version 'default': nothing was published"):
        parse_generation({"output_ids": [5], "meta_info": meta}, engine="e", started=0.0, finished=0.0)


def test_the_witness_fuses_as_sglang_does() -> None:
    torch = pytest.importorskip("torch")
    from miles_core.engines.sglang_weights import SglangWitness

    generator = torch.Generator().manual_seed(0)
    parts = {name: torch.randn(3, 4, generator=generator) for name in ("q", "k", "v", "gate", "up", "down", "plain")}
    witness = SglangWitness(on_gpu=False)
    for name in ("v", "q", "k"):  # in any order
        witness.see(f"model.layers.0.self_attn.{name}_proj.weight", parts[name])
    for name in ("gate", "up", "down"):
        witness.see(f"model.layers.0.mlp.experts.0.{name}_proj.weight", parts[name])
    witness.see("model.norm.weight", parts["plain"])

    def expected(*names: str) -> str:
        return hashlib.sha256(b"".join(parts[name].numpy().tobytes() for name in names)).hexdigest()[:16]

    assert witness.expected() == {
        "model.layers.0.self_attn.qkv_proj.weight": expected("q", "k", "v"),
        "model.layers.0.mlp.experts.w13_weight": expected("gate", "up"),
        "model.layers.0.mlp.experts.w2_weight": expected("down"),
        "model.norm.weight": expected("plain"),
    }


def test_a_fused_tensor_without_one_of_its_parts_is_named() -> None:
    torch = pytest.importorskip("torch")
    from miles_core.engines.sglang_weights import SglangWitness

    witness = SglangWitness(on_gpu=False)
    witness.see("model.layers.0.mlp.up_proj.weight", torch.zeros(2, 2))
    with pytest.raises(PublishError, match=r"model\.layers\.0\.mlp\.gate_up_proj\.weight: .* part 0 of it"):
        witness.expected()


def _word_hash(data: bytes) -> int:
    """SGLang's `gpu_tensor_hash`, word by word."""
    mask, golden = 0xFFFFFFFF, 0x243F6A88
    seeds = (golden, (golden * 0x9E3779B1 ^ 0xDEADBEEF) & mask)

    def fmix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & mask
        x ^= x >> 13
        x = x * 0xC2B2AE35 & mask
        return x ^ x >> 16

    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    total = 0
    for tile in range(0, len(words), 8192):
        sums = [0, 0]
        for i, word in enumerate(words[tile : tile + 8192], tile):
            for which, (factor, turn) in enumerate(((0x27D4EB2D, 15), (0x165667B1, 13))):
                position = (i * factor + seeds[which]) & mask ^ ((i << turn | i >> 32 - turn) & mask)
                sums[which] = (sums[which] + fmix(word ^ position)) & mask
        nbytes = 4 * len(words) & mask
        total += fmix(sums[0] ^ nbytes) << 32 | fmix(sums[1] ^ nbytes)
    x = total & (1 << 64) - 1
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31


@pytest.mark.parametrize("cuts", [(), (1,), (8191, 8193), (5, 20000)])
def test_the_gpu_hash_is_the_same_in_pieces(cuts: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    from miles_core.engines.sglang_weights import TileHash

    tensor = torch.randn(20480, generator=torch.Generator().manual_seed(1))
    pieces = TileHash()
    for part in torch.tensor_split(tensor, cuts) if cuts else [tensor]:
        pieces.update(part)
    assert pieces.hexdigest() == f"{_word_hash(tensor.numpy().tobytes()):016x}"
