"""The `shared_memory` transport: trainer and engines on one host map the same file.

The sender writes each version into one of two buffers in turn, so that the version before stays mapped by the
engines until all of them have moved on; a buffer that somebody still reads is left to them, and a new one taken.
Engines map the buffer instead of copying it, and lock it as long as they read from it. Address: `{"path": …}`, the
tensors one after another, each aligned to 64 bytes, in the order of `Published.tensors`.
"""

from __future__ import annotations

import shutil
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
from miles_core.sync.plan import described, host_bytes
from miles_core.sync.shared_buffers import InOrder, SharedBuffer, copy_and_check
from miles_core.sync.staging import StagingEngines, aligned, aligned_offsets

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.backends import WeightStream
    from miles_core.contracts.engines import PauseMode

__all__ = ["SharedMemoryTransport"]

_PREFIX = "miles-weights-"


class SharedMemorySender(WeightSender):
    """Writes versions into two buffers in turn."""

    def __init__(self) -> None:
        self._directory = memory_directory(_PREFIX)
        self._made = 0
        self._buffers: list[SharedBuffer] = []  # the last two versions, the older one first

    def send(self, version: int, weights: WeightStream) -> Published:
        begin = time.perf_counter()
        buffer = self._buffer(version)
        try:
            tensors = self._write(buffer, weights)
        except BaseException:
            buffer.close()
            raise
        buffer.offer()
        buffer.version = version
        self._buffers.append(buffer)
        return Published(
            version=version,
            tensors=tuple(tensors),
            address={"path": str(buffer.path)},
            seconds=time.perf_counter() - begin,
        )

    def _write(self, buffer: SharedBuffer, weights: WeightStream) -> list[TensorInfo]:
        position = 0
        with InOrder[TensorInfo]() as threads:
            for name, tensor in weights:
                data = host_bytes(tensor)
                position = aligned(position)
                threads.put(len(data), _write_one, name, tensor, data, buffer.span(position, len(data)))
                position += len(data)
            return threads.results()

    def _buffer(self, version: int) -> SharedBuffer:
        """One that nobody reads: that of the same version (sent again, for an engine that came back), else the older
        one of the last two, else a new one."""
        old = next((buffer for buffer in self._buffers if buffer.version == version), None)
        if old is None and len(self._buffers) == 2:
            old = self._buffers[0]
        if old is not None:
            self._buffers.remove(old)
            if old.claim():
                return old
            old.close()
        self._made += 1
        return SharedBuffer(self._directory / f"buffer-{self._made}")

    def close(self) -> None:
        while self._buffers:
            self._buffers.pop().close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _write_one(name: str, tensor: torch.Tensor, data: memoryview, target: memoryview) -> TensorInfo:
    return described(name, tensor, copy_and_check(data, target))


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
