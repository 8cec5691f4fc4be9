"""Kinds of faults in publishing weights that users of comparable systems met: the right behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aiohttp import web  # noqa: E402

from miles_core.contracts.component import ComponentConfig  # noqa: E402
from miles_core.engines.pool import EnginePool  # noqa: E402
from miles_core.errors import PublishError  # noqa: E402
from miles_core.models.tiny import build_tiny  # noqa: E402
from miles_core.sync.shared_memory import SharedMemoryTransport  # noqa: E402
from miles_core.sync.transaction import publish  # noqa: E402
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine  # noqa: E402
from miles_core.testing.trained_publishes import train_and_publish  # noqa: E402


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tiny")
    build_tiny(target, seed=3)
    return target


def weights(version: int) -> Iterator[tuple[str, Any]]:
    yield "changes", torch.full((8,), float(version))
    yield "stays", torch.ones(3)


@pytest.mark.parametrize("step", ["/stage_weights", "/switch_weights"])
async def test_a_transfer_that_failed_moves_no_version_on(tmp_path: Path, step: str) -> None:
    """It was logged, the version was bumped, and the next delta was taken against what never arrived."""
    engine = StubEngine(hashed_script(10, 2))

    async def refuse(path: str) -> None:
        if path == step:
            raise web.HTTPConflict(text="refused by the test")

    transport = SharedMemoryTransport(ComponentConfig())
    sender, receiver = transport.sender(tmp_path), transport.receiver(tmp_path)
    async with stub_engine(engine) as url:
        pool = EnginePool([url], deadline=5.0)
        try:
            first = sender.send(1, weights(1))
            await publish(first, receiver, pool, mode="retract", transport="shared_memory")
            engine.on_call = refuse
            with pytest.raises(PublishError, match="refused by the test"):
                await publish(sender.send(2, weights(2)), receiver, pool, mode="retract", transport="shared_memory")
            assert (engine.version, engine.weights) == (1, first.checksums)
            assert not engine.paused
            engine.on_call = None
            third = sender.send(3, weights(3))
            await publish(third, receiver, pool, mode="retract", transport="shared_memory")
            assert (engine.version, engine.weights) == (3, third.checksums)
        finally:
            await pool.close()
            await receiver.close()
            sender.close()


async def test_a_head_that_is_no_longer_tied_is_refused_by_name(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding was patched, and the engine's copy of it, the head, was left behind."""
    from miles_core.engines.embedded import command

    load = command.load_model

    def untied(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
        return model

    monkeypatch.setattr(command, "load_model", untied)
    with pytest.raises(PublishError, match=r"lm_head\.weight"):
        await train_and_publish(SharedMemoryTransport(ComponentConfig()), directory, tmp_path)


async def test_adapters_that_are_not_delivered_show_in_what_is_served(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checksums match, and the engine serves the model of the start."""
    pytest.importorskip("peft")
    from miles_core.training import weights as named

    lora = {"lora": {"rank": 2, "targets": ("q_proj", "down_proj")}}
    monkeypatch.setattr(named, "merged", lambda weight, module: weight.clone())
    with pytest.raises(AssertionError, match=r"version 2: log-probs are 0\.\d+ apart"):
        await train_and_publish(SharedMemoryTransport(ComponentConfig()), directory, tmp_path, backend=lora)


async def test_a_prefix_that_old_weights_computed_is_not_served_under_new_ones(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt is sampled from under every version: a cache that outlives its weights is found, ours does not."""
    from miles_core.engines.embedded.scheduler import Scheduler

    await train_and_publish(SharedMemoryTransport(ComponentConfig()), directory, tmp_path)
    monkeypatch.setattr(Scheduler, "forget_prefixes", lambda self: None)
    with pytest.raises(AssertionError, match="apart"):
        await train_and_publish(SharedMemoryTransport(ComponentConfig()), directory, tmp_path)
