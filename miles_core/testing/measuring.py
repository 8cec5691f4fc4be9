"""Measuring a transport on this host: whole publishes, by both of its ends, to engines without a model.

The sink is the stub engine, which speaks the staged and the in-place protocol and computes checksums of what it got.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import MilesError
from miles_core.plugins import PluginManager
from miles_core.sync.auto import Measurement

if TYPE_CHECKING:
    import torch

__all__ = ["measure", "plain_rates"]

_TENSOR_BYTES = 4_000_000
_MEASURE_SECONDS = 120.0


def measure(
    plugins: PluginManager, use: str, settings: dict[str, Any], nbytes: int, engines: int, repeats: int
) -> Measurement:
    """Publish `repeats` versions by both ends of the transport, in the real transaction. The first is not counted."""
    label = " ".join([use, *(str(v) for v in settings.values())])
    try:
        best, share = asyncio.run(_publishes(plugins, use, settings, nbytes, engines, repeats))
    except (MilesError, ImportError) as error:
        return Measurement(transport=label, failure=f"{type(error).__name__}: {error}")
    return Measurement(
        transport=label,
        nbytes=nbytes,
        engines=engines,
        seconds=best.seconds,
        paused_seconds=best.paused_seconds,
        verify_share=share / best.seconds,
    )


async def _publishes(
    plugins: PluginManager, use: str, settings: dict[str, Any], nbytes: int, engines: int, repeats: int
) -> tuple[Any, float]:
    """The quickest publish, and the seconds that checksums take in one: a pass in the trainer and one an engine."""
    from miles_core.contracts.transports import WeightTransport
    from miles_core.engines.pool import EnginePool
    from miles_core.sync.checksums import checksum
    from miles_core.sync.plan import host_bytes
    from miles_core.sync.transaction import publish
    from miles_core.testing.stub_engine import StubEngine, hashed_script, served_stub

    transport = plugins.create("miles_weight_transports", use, settings, WeightTransport)
    weights = list(_weights(nbytes))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [stack.enter_context(served_stub(StubEngine(hashed_script(10, 1)))).url for _ in range(engines)]
        pool = EnginePool(urls, wait_for_weights=True)
        sender, receiver = transport.sender(directory), transport.receiver(directory)
        done = []
        try:
            for version in range(1, repeats + 2):
                weights[0][1][0] = version
                published = await asyncio.to_thread(sender.send, version, iter(weights))

                async def transfer(session: Any, published: Any = published) -> None:
                    await asyncio.to_thread(sender.transfer, published, iter(weights), session)

                done.append(await publish(published, receiver, pool, mode="retract", transport=use, transfer=transfer))
        finally:
            await receiver.close()
            await pool.close()
            sender.close()
    begin = time.perf_counter()
    for _, tensor in weights:
        checksum(host_bytes(tensor))
    once = time.perf_counter() - begin
    return min(done[1:], key=lambda d: d.seconds), once * (1 + engines)


def _weights(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    for index in range(max(1, nbytes // _TENSOR_BYTES)):
        size = min(_TENSOR_BYTES, nbytes)
        yield f"layers.{index}.weight", torch.randint(0, 255, (size,), generator=generator, dtype=torch.uint8)


def plain_rates(nbytes: int, engines: int, repeats: int) -> dict[str, float]:
    """Seconds, the best of `repeats`: one copy in memory an engine, and one gloo broadcast of the same bytes to as many
    ranks, without names, checksums or a transaction."""
    import torch

    data, copy = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    found = {"memcpy": _best(repeats, lambda: [copy.copy_(data) for _ in range(engines)])}
    found["gloo broadcast"] = _gloo(data, engines, repeats)
    return found


def _best(repeats: int, work: Any) -> float:
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def _gloo(data: torch.Tensor, engines: int, repeats: int) -> float:
    import datetime
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=_MEASURE_SECONDS)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    held = [data, *(torch.zeros_like(data) for _ in range(engines))]

    def member(rank: int) -> Any:
        own = TCPStore("127.0.0.1", store.port, is_master=False, timeout=limit)
        return dist.ProcessGroupGloo(own, rank, engines + 1, limit)

    with ThreadPoolExecutor(engines + 1) as pool:
        groups = list(pool.map(member, range(engines + 1)))

        def once() -> None:
            list(pool.map(lambda rank: groups[rank].broadcast(held[rank], 0).wait(), range(engines + 1)))

        return _best(repeats, once)
