"""The publish transaction under faults: engines serve exactly one version, never paused for ever."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
from aiohttp import web

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import PauseMode
from miles_core.contracts.transports import Published, WeightReceiver
from miles_core.engines.pool import EnginePool
from miles_core.errors import EngineError, PublishError
from miles_core.sync.shared_memory import SharedMemoryTransport
from miles_core.sync.transaction import publish
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

torch = pytest.importorskip("torch")


def weights(seed: int) -> Iterator[tuple[str, object]]:
    generator = torch.Generator().manual_seed(seed)
    yield "embed.weight", torch.randn(7, 3, generator=generator)
    yield "half.weight", torch.randn(5, generator=generator).to(torch.bfloat16)
    yield "empty", torch.zeros(0, 4)
    yield "scalar", torch.tensor(-0.0)


@contextlib.asynccontextmanager
async def fleet(count: int = 2) -> AsyncIterator[tuple[list[StubEngine], EnginePool]]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [StubEngine(hashed_script(10, 2)) for _ in range(count)]
        urls = [await stack.enter_async_context(stub_engine(engine)) for engine in engines]
        pool = EnginePool(urls, deadline=5.0)
        stack.push_async_callback(pool.close)
        yield engines, pool


@contextlib.asynccontextmanager
async def ends(tmp_path: Path) -> AsyncIterator[tuple[object, WeightReceiver]]:
    transport = SharedMemoryTransport(ComponentConfig())
    sender, receiver = transport.sender(tmp_path), transport.receiver(tmp_path)
    try:
        yield sender, receiver
    finally:
        await receiver.close()
        sender.close()


async def test_every_engine_holds_the_trainers_checksums(tmp_path: Path) -> None:
    async with fleet() as (engines, pool), ends(tmp_path) as (sender, receiver):
        for version in (1, 2, 3, 4):
            published = sender.send(version, weights(version))
            done = await publish(published, receiver, pool, mode="retract", transport="shared_memory")
            assert done.version == version
            assert done.seconds >= done.paused_seconds > 0
            for engine in engines:
                assert engine.version == version
                assert engine.weights == {t.name: t.checksum for t in published.tensors}
                assert not engine.paused


async def test_buffers_are_gone_afterwards(tmp_path: Path) -> None:
    async with ends(tmp_path) as (sender, _):
        published = sender.send(1, weights(1))
        path = Path(str(published.address["path"]))
        assert path.exists()
    assert not path.exists()
    assert not path.parent.exists()


async def test_the_version_before_stays_readable_while_the_next_is_written(tmp_path: Path) -> None:
    async with ends(tmp_path) as (sender, _):
        first = sender.send(1, weights(1))
        sender.send(2, weights(2))
        assert Path(str(first.address["path"])).exists()


async def test_a_corrupted_tensor_reaches_no_engine(tmp_path: Path) -> None:
    async with fleet() as (engines, pool), ends(tmp_path) as (sender, receiver):
        await publish(sender.send(1, weights(1)), receiver, pool, mode="retract", transport="t")
        engines[1].corrupt_staging = True
        with pytest.raises(PublishError, match=r"embed\.weight has checksum 0+, expected"):
            await publish(sender.send(2, weights(2)), receiver, pool, mode="retract", transport="t")
        assert [e.version for e in engines] == [1, 1]
        assert [e.staged for e in engines] == [None, None]
        assert not any(e.paused for e in engines)


async def test_a_flipped_byte_in_the_buffer_is_refused(tmp_path: Path) -> None:
    async with fleet() as (engines, pool), ends(tmp_path) as (sender, receiver):
        published = sender.send(1, weights(1))
        path = Path(str(published.address["path"]))
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
        with pytest.raises(PublishError, match="409"):
            await publish(published, receiver, pool, mode="retract", transport="t")
        assert [e.version for e in engines] == [0, 0]


class Failing(WeightReceiver):
    """Fails at one step of one engine, and passes everything else through."""

    def __init__(self, inner: WeightReceiver, step: str, url: str) -> None:
        self.inner, self.step, self.url = inner, step, url

    async def _maybe(self, step: str, url: str) -> None:
        if (step, url) == (self.step, self.url):
            raise EngineError(f"{step} fails at {url}")

    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        await self._maybe("stage", url)
        return await self.inner.stage(url, published)

    async def commit(self, url: str, published: Published) -> None:
        await self._maybe("commit", url)
        await self.inner.commit(url, published)

    async def discard(self, url: str, published: Published) -> None:
        await self._maybe("discard", url)
        await self.inner.discard(url, published)


@pytest.mark.parametrize("index", [0, 1])
async def test_an_engine_that_cannot_stage_stops_the_version_everywhere(tmp_path: Path, index: int) -> None:
    async with fleet() as (engines, pool), ends(tmp_path) as (sender, receiver):
        failing = Failing(receiver, "stage", pool.urls[index])
        with pytest.raises(PublishError, match="was not published"):
            await publish(sender.send(1, weights(1)), failing, pool, mode="retract", transport="t")
        assert [e.version for e in engines] == [0, 0]
        assert not any(e.paused for e in engines)


async def test_a_failed_commit_says_who_took_it_and_resumes_everybody(tmp_path: Path) -> None:
    async with fleet() as (engines, pool), ends(tmp_path) as (sender, receiver):
        failing = Failing(receiver, "commit", pool.urls[0])
        with pytest.raises(PublishError, match="not committed by") as caught:
            await publish(sender.send(1, weights(1)), failing, pool, mode="retract", transport="t")
        assert pool.urls[1] in str(caught.value)
        assert not any(e.paused for e in engines)


@pytest.mark.parametrize(
    ("path", "mode"), [("/stage_weights", "retract"), ("/switch_weights", "in_place"), ("/weights_checker", "abort")]
)
async def test_an_engine_that_answers_nonsense_is_an_error(tmp_path: Path, path: str, mode: PauseMode) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.json_response(["what"])

    engine = StubEngine(hashed_script(10, 2))
    app = web.Application()
    app.router.add_post(path, nonsense)
    for route in engine.application().router.routes():
        if route.resource is not None and route.resource.canonical != path and route.method != "HEAD":
            app.router.add_route(route.method, route.resource.canonical, route.handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    pool = EnginePool([f"http://{host}:{port}"], deadline=5.0)
    try:
        async with ends(tmp_path) as (sender, receiver):
            with pytest.raises(PublishError, match="expected checksums by name"):
                await publish(sender.send(1, weights(1)), receiver, pool, mode=mode, transport="t")
        assert not engine.paused
    finally:
        await pool.close()
        await runner.cleanup()


def test_buffers_of_dead_trainers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_core.sync import memory_files, shared_memory

    monkeypatch.setattr(memory_files, "memory_root", lambda: tmp_path)
    dead = tmp_path / "miles-weights-999999999-abc"
    dead.mkdir()
    (dead / "version-1").write_bytes(b"x")
    alive = tmp_path / "miles-weights-1-abc"
    alive.mkdir()
    sender = shared_memory.SharedMemorySender()
    sender.close()
    assert not dead.exists()
    assert alive.exists()
