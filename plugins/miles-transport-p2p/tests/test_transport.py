"""The component on the real libraries: every law of the kind, faults, one buffer for any number of targets, a run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from miles_transport_p2p.libraries import installed
from miles_transport_p2p.transport import P2PConfig, P2PTransport

from miles_core.engines.pool import EnginePool
from miles_core.errors import PublishError
from miles_core.sync.transaction import publish
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine
from miles_core.testing.suites import TransportSuite

REPOSITORY = Path(__file__).parents[3]
FOUND = installed()
AVAILABLE = [
    pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=f"{name}: {why}")) for name, why in FOUND.items()
]


class TestP2P(TransportSuite):
    component = P2PTransport


@pytest.mark.skipif(bool(FOUND["mooncake"]), reason=FOUND["mooncake"])
class TestMooncake(TransportSuite):
    component = P2PTransport
    settings: ClassVar = {"library": "mooncake"}


def weights(version, size=3000):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(version)
    yield "a", torch.randn(size, 40, generator=generator)
    yield "b", torch.randn(7, generator=generator).to(torch.bfloat16)
    yield "c", torch.zeros(0)


class Fleet:
    """Stub engines with both ends of a transport."""

    def __init__(self, count, tmp_path, **settings):
        self.engines = [StubEngine(hashed_script(10, 2)) for _ in range(count)]
        transport = P2PTransport(P2PConfig(**{"bucket_mb": 1, "timeout": 10.0, **settings}))
        self.sender, self.receiver = transport.sender(tmp_path), transport.receiver(tmp_path)

    async def __aenter__(self):
        self._stack = [stub_engine(engine) for engine in self.engines]
        self.urls = [await served.__aenter__() for served in self._stack]
        self.pool = EnginePool(self.urls, deadline=5.0, wait_for_weights=True, control_deadline=2.0)
        return self

    async def __aexit__(self, *error):
        await self.receiver.close()
        await self.pool.close()
        for served in self._stack:
            await served.__aexit__(*error)
        self.sender.close()

    async def publish(self, version):
        published = await asyncio.to_thread(self.sender.send, version, weights(version))
        await publish(published, self.receiver, self.pool, mode="retract", transport="p2p")
        return published

    def hold(self, published):
        return all(e.version == published.version and e.weights == published.checksums for e in self.engines)


@pytest.mark.parametrize("library", AVAILABLE)
async def test_one_buffer_whatever_the_number_of_targets(tmp_path, library):
    sizes = []
    counts = (1, 2, 4, 8) if library == "nixl" else (1, 2)
    async with Fleet(counts[-1], tmp_path, library=library) as fleet:
        for version, count in enumerate(counts, start=1):
            published = await asyncio.to_thread(fleet.sender.send, version, weights(version))
            urls = fleet.urls[:count]
            await publish(published, fleet.receiver, fleet.pool, mode="retract", transport="p2p", urls=urls)
            assert all(engine.weights == published.checksums for engine in fleet.engines[:count])
            sizes.append(fleet.sender.registered_bytes)
        assert set(fleet.receiver.protocols) == set(fleet.urls)
        assert all(p.startswith(f"{library} over ") for p in fleet.receiver.protocols.values())
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("library", AVAILABLE)
async def test_a_peer_that_is_lost_and_comes_back(tmp_path, library):
    async with Fleet(2, tmp_path, library=library) as fleet:
        await fleet.publish(1)
        target = fleet.receiver._targets[fleet.urls[0]]
        target.process.kill()
        await target.process.wait()
        for version in (2, 3):
            assert fleet.hold(await fleet.publish(version))


@pytest.mark.parametrize("library", AVAILABLE)
async def test_the_target_is_killed_while_it_is_written_to(tmp_path, library):
    async with Fleet(1, tmp_path, library=library) as fleet:
        await fleet.publish(1)
        process = fleet.receiver._targets[fleet.urls[0]].process
        sending = asyncio.create_task(asyncio.to_thread(fleet.sender.send, 2, weights(2)))
        process.kill()
        published = await sending  # a failure to write ahead is told when the version is asked for
        await publish(published, fleet.receiver, fleet.pool, mode="retract", transport="p2p")
        assert fleet.hold(published)


@pytest.mark.parametrize("times", [1, 9])
async def test_a_corrupt_byte_is_sent_again_or_refused(tmp_path, times, monkeypatch):
    if "" not in FOUND.values():
        pytest.skip(str(FOUND))
    async with Fleet(1, tmp_path) as fleet:
        await fleet.publish(1)
        left = [times]
        stage = fleet.receiver._engines.stage

        async def corrupting(url, path, *rest):
            if left[0]:
                left[0] -= 1
                with Path(path).open("r+b") as file:
                    file.seek(100)
                    byte = file.read(1)
                    file.seek(100)
                    file.write(bytes([byte[0] ^ 1]))
            return await stage(url, path, *rest)

        fleet.receiver._engines.stage = corrupting
        if times == 1:
            assert fleet.hold(await fleet.publish(2))
            return
        with pytest.raises(PublishError, match=r"sent 3 times.*checksum"):
            await fleet.publish(2)
        assert fleet.engines[0].version == 1
        assert not fleet.engines[0].paused
        left[0] = 0
        assert fleet.hold(await fleet.publish(3))


async def test_two_publishers_never_share_a_slot(tmp_path):
    if "" not in FOUND.values():
        pytest.skip(str(FOUND))
    from miles_transport_p2p.agent import Agent
    from miles_transport_p2p.libraries import open_library

    agent = Agent(open_library("auto", "127.0.0.1"))
    first = agent.prepare({"nbytes": 5000, "owner": "one"})
    with pytest.raises(PublishError, match="another publisher"):
        agent.prepare({"nbytes": 5000, "owner": "two"})
    agent.serve({"slot": first["slot"]})
    assert agent.prepare({"nbytes": 5000, "owner": "two"})["slot"] != first["slot"]
    agent.close()


def test_rdma_that_is_not_there_is_refused(tmp_path):
    if "" not in FOUND.values() or Path("/sys/class/infiniband").is_dir():
        pytest.skip("needs a library, and no adapter")
    with pytest.raises(PublishError, match=r"require_rdma.*none"):
        P2PTransport(P2PConfig(require_rdma=True)).sender(tmp_path)


@pytest.mark.parametrize("library", AVAILABLE)
def test_a_run(tmp_path, library):
    pytest.importorskip("transformers")
    options = ["transport.use=p2p", f"transport.library={library}", f"run.directory={tmp_path}", "run.name=p2p"]
    options += ["evaluation.every=0", "run.steps=3"]
    command = [sys.executable, "-m", "miles_core.cli.main", "train", "examples/tiny.toml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sets = [word for option in options for word in ("--set", option)]
    done = subprocess.run(
        [*command, *sets], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
