"""The `shared_memory` transport: trainer and engines on one host map the same file.

The sender writes each version into one of two buffers in turn, so that the version before stays mapped by the
engines until all of them have moved on. Engines map the buffer instead of copying it. Address: `{"path": …}`, the
tensors one after another, each aligned to 64 bytes, in the order of `Published.tensors`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from miles_core.contracts.component import ComponentConfig, Conflict
from miles_core.contracts.transports import (
    Published,
    TensorInfo,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from miles_core.sync.memory_files import memory_directory
from miles_core.sync.plan import describe, host_bytes
from miles_core.sync.staging import StagingEngines, aligned, aligned_offsets

if TYPE_CHECKING:
    from miles_core.contracts.backends import WeightStream
    from miles_core.contracts.engines import PauseMode

__all__ = ["SharedMemoryTransport"]

_PREFIX = "miles-weights-"


class SharedMemorySender(WeightSender):
    """Writes versions into two files in turn. The files are new for every version: an engine that still maps an old one
    keeps its pages, whatever happens to the name."""

    def __init__(self) -> None:
        self._directory = memory_directory(_PREFIX)
        self._paths: list[Path] = []

    def send(self, version: int, weights: WeightStream) -> Published:
        begin = time.perf_counter()
        path = self._directory / f"version-{version}"
        path.unlink(missing_ok=True)
        tensors: list[TensorInfo] = []
        with path.open("xb", buffering=1 << 20) as file:
            position = 0
            for name, tensor in weights:
                file.write(b"\0" * (aligned(position) - position))
                info = describe(name, host := tensor.detach().to("cpu").contiguous())
                file.write(host_bytes(host))
                position = aligned(position) + info.nbytes
                tensors.append(info)
        if path in self._paths:  # the same version once more, for an engine that came back
            self._paths.remove(path)
        self._paths.append(path)
        while len(self._paths) > 2:
            self._paths.pop(0).unlink(missing_ok=True)
        return Published(
            version=version,
            tensors=tuple(tensors),
            address={"path": str(path)},
            seconds=time.perf_counter() - begin,
        )

    def close(self) -> None:
        while self._paths:
            self._paths.pop().unlink(missing_ok=True)
        if self._directory.exists():
            self._directory.rmdir()


class SharedMemoryReceiver(WeightReceiver):
    """Tells engines to map the buffer."""

    atomic = True

    def __init__(self) -> None:
        self.engines = StagingEngines()

    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        offsets, _ = aligned_offsets(t.nbytes for t in published.tensors)
        path = str(published.address["path"])
        return await self.engines.stage(url, path, published.tensors, offsets, published.version)

    async def commit(self, url: str, published: Published) -> None:
        await self.engines.commit(url, published.version)

    async def switch(self, url: str, published: Published, mode: PauseMode) -> Mapping[str, str]:
        return await self.engines.switch(url, published.version, mode)

    async def discard(self, url: str, published: Published) -> None:
        await self.engines.discard(url, published.version)

    async def close(self) -> None:
        await self.engines.close()


class SharedMemoryTransport(WeightTransport[ComponentConfig]):
    """Trainer and engines on one host, one mapped file, no copy on the engine's side."""

    several_fleets = True
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key="engine.use",
            values=("sglang",),
            reason='SGLang cannot map another process\'s buffer; use transport = "broadcast"',
        ),
        Conflict(
            key="launcher.use",
            values=("ray",),
            reason='trainer and engines may be on different hosts; use transport = "broadcast" or "p2p"',
        ),
    )

    def sender(self, run_directory: Path) -> SharedMemorySender:
        return SharedMemorySender()

    def receiver(self, run_directory: Path) -> SharedMemoryReceiver:
        return SharedMemoryReceiver()
