"""The `shared_memory` transport: trainer and engines on one host map the same file.

The sender writes each version into one of two buffers in turn, so that the version before stays mapped by the
engines until all of them have moved on. Engines map the buffer instead of copying it. Address: `{"path": …}`, the
tensors one after another, each aligned to 64 bytes, in the order of `Published.tensors`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
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
from miles_core.errors import EngineError, PublishError
from miles_core.http import JsonHttp
from miles_core.sync.plan import describe, host_bytes

if TYPE_CHECKING:
    from miles_core.contracts.backends import WeightStream
    from miles_core.contracts.engines import PauseMode

__all__ = ["SharedMemoryTransport"]

_ALIGNMENT = 64
_PREFIX = "miles-weights-"


def _buffer_directory() -> Path:
    """Memory-backed where the platform has it; elsewhere the page cache does the same work."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _remove_orphans(directory: Path) -> None:
    """Remove the buffers of trainers that were killed: their process is gone, nobody else will."""
    for path in directory.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class SharedMemorySender(WeightSender):
    """Writes versions into two files in turn. The files are new for every version: an engine that still maps an old one
    keeps its pages, whatever happens to the name."""

    def __init__(self) -> None:
        _remove_orphans(_buffer_directory())
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_buffer_directory()))
        self._paths: list[Path] = []

    def send(self, version: int, weights: WeightStream) -> Published:
        begin = time.perf_counter()
        path = self._directory / f"version-{version}"
        path.unlink(missing_ok=True)
        tensors: list[TensorInfo] = []
        with path.open("xb", buffering=1 << 20) as file:
            position = 0
            for name, tensor in weights:
                padding = -position % _ALIGNMENT
                file.write(b"\0" * padding)
                info = describe(name, host := tensor.detach().to("cpu").contiguous())
                file.write(host_bytes(host))
                position += padding + info.nbytes
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
    """Tells engines to map the buffer (the embedded engine's two-phase weight protocol)."""

    atomic = True

    def __init__(self) -> None:
        self._http = JsonHttp(deadline=300.0)

    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        try:
            answer = await self._http.call("POST", f"{url}/stage_weights", _manifest(published))
        except EngineError as error:
            raise PublishError(f"staging version {published.version}: {error}") from error
        return _checksums(url, answer)

    async def commit(self, url: str, published: Published) -> None:
        try:
            await self._http.call("POST", f"{url}/commit_weights", {"weight_version": published.version})
        except EngineError as error:
            raise PublishError(f"committing version {published.version}: {error}") from error

    async def switch(self, url: str, published: Published, mode: PauseMode) -> Mapping[str, str]:
        body = {"weight_version": published.version, "mode": mode}
        try:
            answer = await self._http.call("POST", f"{url}/switch_weights", body)
        except EngineError as error:
            raise PublishError(f"switching to version {published.version}: {error}") from error
        return _checksums(url, answer)

    async def discard(self, url: str, published: Published) -> None:
        await self._http.call("POST", f"{url}/discard_weights", {"weight_version": published.version}, deadline=10.0)

    async def close(self) -> None:
        await self._http.close()


def _checksums(url: str, answer: object) -> Mapping[str, str]:
    found = answer.get("checksums") if isinstance(answer, dict) else None
    if not isinstance(found, dict):
        raise PublishError(f"{url} answered {str(answer)[:200]}, expected checksums by name")
    return found


def _manifest(published: Published) -> dict[str, object]:
    offset = 0
    entries = []
    for tensor in published.tensors:
        offset += -offset % _ALIGNMENT
        entries.append(
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": offset,
                "nbytes": tensor.nbytes,
                "checksum": tensor.checksum,
            }
        )
        offset += tensor.nbytes
    return {"path": published.address["path"], "tensors": entries, "weight_version": published.version}


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
