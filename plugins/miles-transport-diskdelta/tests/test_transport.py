"""The component: every law of the kind, what it refuses, and whole runs with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner
from diskdelta_support import holds, raw
from miles_transport_diskdelta.replica import Replica
from miles_transport_diskdelta.transport import DiskDeltaConfig, DiskDeltaTransport
from miles_transport_diskdelta.writer import ChainWriter

from miles_core.cli.main import cli
from miles_core.config.load import load_config, loaded_from_tree
from miles_core.config.preflight import preflight
from miles_core.engines.pool import EnginePool
from miles_core.errors import PublishError
from miles_core.plugins import PluginManager
from miles_core.sync.transaction import publish
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine
from miles_core.testing.suites import TransportSuite

REPOSITORY = Path(__file__).parents[3]


class TestDiskDelta(TransportSuite):
    component = DiskDeltaTransport


class TestOverwrite(TransportSuite):
    component = DiskDeltaTransport
    settings: ClassVar = {"encoding": "overwrite", "snapshot_every": 1, "threads": 1}


def problems(**sections) -> list[str]:
    tree = {
        **load_config(REPOSITORY / "examples" / "tiny.toml").resolved(),
        "transport": {"use": "disk_delta"},
        **sections,
    }
    return [p.message for p in preflight(loaded_from_tree(tree, {}), PluginManager.discover()).problems]


def test_what_it_refuses_and_why(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert not [m for m in problems() if "cannot go with" in m]
    (lora,) = [m for m in problems(backend={"use": "fsdp", "lora": {"rank": 4}}) if "backend.lora" in m]
    assert "delta" in lora
    sglang = problems(engine={"use": "sglang", "urls": ["http://127.0.0.1:1"]})
    assert [m for m in sglang if "beside the one in use" in m]


def test_the_readme_shows_a_section_that_works():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    section = tomllib.loads(text.split("```toml\n")[1].split("```")[0])["transport"]
    assert section.pop("use") == "disk_delta"
    DiskDeltaConfig.model_validate(section)


async def test_an_engine_keeps_its_file_until_it_has_switched(tmp_path):
    """Two engines; one is lost between stage and commit. No file that either may serve from is written to."""
    torch = pytest.importorskip("torch")

    def weights(version):
        yield "a", torch.full((100,), 1.0) + version * (torch.arange(100) == 7)
        yield "b", torch.zeros(0)

    transport = DiskDeltaTransport(DiskDeltaConfig(threads=1))
    sender, receiver = transport.sender(tmp_path), transport.receiver(tmp_path)
    engines = [StubEngine(hashed_script(10, 2)) for _ in range(2)]
    async with stub_engine(engines[0]) as one, stub_engine(engines[1]) as two:
        pool = EnginePool([one, two], deadline=5.0, wait_for_weights=True, control_deadline=2.0)
        contents: dict[Path, bytes] = {}
        for version in range(1, 9):
            if version == 4:
                engines[1].on_call = _refuse_commit
            if version == 6:
                engines[1].on_call = None
            published = sender.send(version, weights(version))
            try:
                await publish(published, receiver, pool, mode="retract", transport="disk_delta")
            except PublishError:
                assert version in (4, 5)
            for paths in receiver._serving.values():
                for path in paths:
                    assert contents.setdefault(path, path.read_bytes()) == path.read_bytes()
            contents = {p: p.read_bytes() for paths in receiver._serving.values() for p in paths}
            assert engines[0].version == version
            assert engines[0].weights == published.checksums
        assert engines[1].version == 8
        assert len(receiver._replicas) <= 3
        await pool.close()
        await receiver.close()
    sender.close()
    left = {p.name for p in (tmp_path / "replicas").iterdir()}
    assert left == {"controller.lock", "trainer.lock"}


async def _refuse_commit(path):
    from aiohttp import web

    if path == "/commit_weights":
        raise web.HTTPConflict(text="refused by the test")


def test_commands(tmp_path):
    writer = ChainWriter(tmp_path / "chain", tmp_path / "snapshot", snapshot_every=2)
    for version in range(4):
        writer.publish(version, raw(version))
    writer.close()
    run = CliRunner().invoke
    chain, out, checkpoint = str(tmp_path / "chain"), str(tmp_path / "out"), str(tmp_path / "model.safetensors")
    listed = run(cli, ["delta", "inspect", chain], catch_exceptions=False)
    assert "1 whole" in listed.output
    assert listed.exit_code == 0
    assert "verified" in run(cli, ["delta", "verify", chain], catch_exceptions=False).output
    applied = run(cli, ["delta", "apply", chain, out, "--safetensors", checkpoint], catch_exceptions=False)
    assert "holds version 3" in applied.output
    assert holds(Replica(tmp_path / "out"), 3)
    run(cli, ["delta", "apply", chain, out, "--version", "2"], catch_exceptions=False)
    assert holds(Replica(tmp_path / "out"), 2)
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    loaded = safetensors.load_file(checkpoint)
    expected = {name: (shape, data.tobytes()) for name, _, shape, data in raw(3)}
    for name, tensor in loaded.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert (tuple(tensor.shape), data) == expected[name]
    assert loaded.keys() == expected.keys()
    path = next((tmp_path / "chain").glob("0*/full.bin"))
    path.write_bytes(path.read_bytes()[:-1])
    assert run(cli, ["delta", "verify", chain]).exit_code == 1


def miles(*arguments, cwd) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "miles_core.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_run(tmp_path):
    """Every publish of the run is compared with the engine's own checksums; the chain is the run's, and verifies."""
    pytest.importorskip("transformers")
    options = ["--set", "transport.use=disk_delta", "--set", f"run.directory={tmp_path}", "--set", "run.name=delta"]
    options += ["--set", "transport.snapshot_every=3", "--set", "evaluation.every=0", "--set", "run.steps=4"]
    miles("train", "examples/tiny.toml", *options, cwd=REPOSITORY)
    chain = tmp_path / "delta" / "deltas"
    assert "verified" in miles("delta", "verify", str(chain), cwd=REPOSITORY)
    assert json.loads((chain / "00000004" / "manifest.json").read_bytes())["version"] == 4
    miles("audit", str(tmp_path / "delta"), cwd=REPOSITORY)
