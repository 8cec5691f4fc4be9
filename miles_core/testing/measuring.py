"""Measuring a transport on this host: whole publishes, by both of its ends, in the real transaction.

`measure` publishes to stub engines in this process, which speak the staged and the in-place protocol and compute
checksums of what they got: quick to start, and what `auto` compares. `measure_publishes` takes engines of any kind.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.transports import WeightTransport
from miles_core.errors import MilesError
from miles_core.plugins import PluginManager
from miles_core.sync.auto import Measurement

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.events import VersionPublished

__all__ = ["measure", "measure_publishes", "plain_rates"]

_TENSOR_BYTES = 4_000_000
_MEASURE_SECONDS = 120.0


def measure(
    plugins: PluginManager, use: str, settings: dict[str, Any], nbytes: int, engines: int, repeats: int
) -> Measurement:
    """Publish `repeats` versions of `nbytes` to stub engines."""
    from miles_core.testing.stub_engine import StubEngine, hashed_script, served_stub

    with ExitStack() as stack:
        urls = [stack.enter_context(served_stub(StubEngine(hashed_script(10, 1)))).url for _ in range(engines)]
        return measure_publishes(plugins, use, settings, list(_weights(nbytes)), urls, repeats)


def measure_publishes(
    plugins: PluginManager,
    use: str,
    settings: dict[str, Any],
    weights: Sequence[tuple[str, torch.Tensor]],
    urls: Sequence[str],
    repeats: int,
) -> Measurement:
    """Publish `repeats` versions of `weights`, of which the first element changes, by both ends of the transport. The
    first two are not counted: buffers are new then."""
    label = " ".join([use, *(str(v) for v in settings.values())])
    try:
        transport = plugins.create("miles_weight_transports", use, settings, WeightTransport)
        best, checking = asyncio.run(_publishes(transport, use, weights, urls, repeats))
    except (MilesError, ImportError) as error:
        return Measurement(transport=label, failure=f"{type(error).__name__}: {error}")
    return Measurement(
        transport=label,
        nbytes=best.nbytes,
        engines=len(urls),
        seconds=best.seconds,
        paused_seconds=best.paused_seconds,
        verify_share=checking / best.seconds,
    )


async def _publishes(
    transport: WeightTransport[Any],
    use: str,
    weights: Sequence[tuple[str, torch.Tensor]],
    urls: Sequence[str],
    repeats: int,
) -> tuple[VersionPublished, float]:
    """The quickest publish, and the seconds that the checksums of one take when all cores compute them: a pass in the
    trainer, one an engine, and a second one an engine where the version was staged."""
    from miles_core.data.checksums import checksum, over_threads
    from miles_core.engines.pool import EnginePool
    from miles_core.sync.plan import host_bytes
    from miles_core.sync.transaction import publish

    with tempfile.TemporaryDirectory() as directory:
        pool = EnginePool(urls, wait_for_weights=True)
        sender, receiver = transport.sender(Path(directory)), transport.receiver(Path(directory))
        done = []
        try:
            for version in range(1, repeats + 3):
                weights[0][1].view(-1)[0] = version
                published = await asyncio.to_thread(sender.send, version, iter(weights))

                async def transfer(session: Any, published: Any = published) -> None:
                    await asyncio.to_thread(sender.transfer, published, iter(weights), session)

                done.append(await publish(published, receiver, pool, mode="retract", transport=use, transfer=transfer))
        finally:
            await receiver.close()
            await pool.close()
            sender.close()
    parts = [host_bytes(tensor) for _, tensor in weights]
    once = _best(2, lambda: over_threads(checksum, parts, [*map(len, parts)], os.cpu_count() or 1))
    passes = 1 + len(urls) * (1 if receiver.in_place else 2)
    return min(done[2:], key=lambda d: d.seconds), once * passes


def _weights(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    for index in range(max(1, nbytes // _TENSOR_BYTES)):
        size = min(_TENSOR_BYTES, nbytes)
        yield f"layers.{index}.weight", torch.randint(0, 255, (size,), generator=generator, dtype=torch.uint8)


def plain_rates(nbytes: int, engines: int, repeats: int) -> dict[str, float]:
    """Seconds, the best of `repeats`: one copy in memory an engine (the C library's), by one thread and by two, and one
    gloo broadcast of the same bytes to as many ranks, without names, checksums or a transaction."""
    import torch

    data, copy = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    source, target = data.numpy(), copy.numpy()
    halves = [slice(0, nbytes // 2), slice(nbytes // 2, nbytes)]
    with ThreadPoolExecutor(2) as pool:

        def in_two() -> None:
            list(pool.map(lambda half: np.copyto(target[half], source[half]), halves))

        found = {
            "memcpy": engines * _best(repeats, lambda: np.copyto(target, source)),
            "memcpy, 2 threads": engines * _best(repeats, in_two),
        }
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
