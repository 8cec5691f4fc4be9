"""The `disk_delta` transport: a chain of changed bytes in a directory that trainer and controller share.

Sender: writes the next entry of the chain. Receiver: keeps replicas, full files of weights beside one another, brings
one that no engine has mapped to the version, and lets engines stage it; the switch is a change of pointers. A replica
that an engine may serve from is never written to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Conflict
from miles_core.contracts.transports import Published, WeightReceiver, WeightSender, WeightTransport
from miles_core.errors import PublishError
from miles_core.sync.plan import host_bytes
from miles_core.sync.staging import StagingEngines
from miles_transport_diskdelta.chain import Chain, DirectoryLock
from miles_transport_diskdelta.manifest import Entry, Reference, layout
from miles_transport_diskdelta.replica import Replica
from miles_transport_diskdelta.writer import ChainWriter, RawTensor

if TYPE_CHECKING:
    from miles_core.contracts.backends import WeightStream
    from miles_core.contracts.engines import PauseMode

__all__ = ["DiskDeltaConfig", "DiskDeltaTransport"]


_PREFIX = "engines-"


class DiskDeltaConfig(ComponentConfig):
    """Changed bytes on a file system that trainer and engines share."""

    directory: str = "deltas"
    """The chain; relative to the run directory."""

    replicas: str = "replicas"
    """Where full copies of the weights are kept for engines to map, and the trainer's own; relative to the run
    directory. Memory-backed is quickest; engines on other hosts must see it under the same path."""

    encoding: Literal["xor", "overwrite"] = "xor"
    """`xor` is smaller, `overwrite` may be applied more than once."""

    snapshot_every: int = Field(default=20, ge=1)
    """Every so many versions a full set is written beside the delta."""

    whole_above: float = Field(default=0.25, gt=0, le=1)
    """A tensor of which a larger share of elements changed is written whole."""

    bucket_mb: int = Field(default=512, ge=1)
    """MiB of tensors that the trainer holds at once."""

    threads: int = Field(default=2, ge=1)
    """Threads that encode, apply and verify, one a tensor."""

    lease: float = Field(default=3600.0, gt=0)
    """Seconds without a publish after which the versions that this run's reader needs may be collected."""


class DiskDeltaSender(WeightSender):
    """Extends the chain."""

    def __init__(self, config: DiskDeltaConfig, run_directory: Path) -> None:
        self._writer = ChainWriter(
            run_directory / config.directory,
            run_directory / config.replicas / "trainer",
            encoding=config.encoding,
            snapshot_every=config.snapshot_every,
            whole_above=config.whole_above,
            bucket_bytes=config.bucket_mb << 20,
            threads=config.threads,
        )

    def send(self, version: int, weights: WeightStream) -> Published:
        begin = time.perf_counter()
        try:
            entry = self._writer.publish(version, _raw(weights))
        except OSError as error:
            raise PublishError(f"writing version {version} to {self._writer.chain.directory}: {error}") from error
        return Published(
            version=version,
            tensors=entry.tensors,
            address={"sequence": entry.sequence, "digest": entry.reference.digest},
            seconds=time.perf_counter() - begin,
        )

    def close(self) -> None:
        self._writer.close()


def _raw(weights: WeightStream) -> Iterator[RawTensor]:
    for name, tensor in weights:
        data = np.frombuffer(host_bytes(tensor), np.uint8)
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


class DiskDeltaReceiver(WeightReceiver):
    """Follows the chain, and shows engines whole files. Two files in turn, as long as every engine switches; another
    for each version that an engine which was lost may still have mapped."""

    atomic = True

    def __init__(self, config: DiskDeltaConfig, run_directory: Path) -> None:
        self._config = config
        self._chain = Chain(run_directory / config.directory)
        self._directory = run_directory / config.replicas
        self._name = f"controller-{socket.gethostname()}-{os.getpid()}"
        self._lock: DirectoryLock | None = None
        self._engines = StagingEngines()
        self._turn = asyncio.Lock()
        self._replicas: list[Replica] = []
        self._serving: dict[str, set[Path]] = {}
        self._staged: dict[str, set[Path]] = {}
        self._made = 0

    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        try:
            async with self._turn:
                entry, path = await asyncio.to_thread(self._materialise, published)
        except OSError as error:
            raise PublishError(f"bringing a replica to version {published.version}: {error}") from error
        self._staged.setdefault(url, set()).add(path)
        offsets = layout(entry.tensors)[0].values()
        checksums = await self._engines.stage(url, path.absolute(), entry.tensors, [*offsets], entry.version)
        self._staged[url] = {path}
        return checksums

    async def commit(self, url: str, published: Published) -> None:
        with self._taking(url):
            await self._engines.commit(url, published.version)

    async def switch(self, url: str, published: Published, mode: PauseMode) -> Mapping[str, str]:
        with self._taking(url):
            return await self._engines.switch(url, published.version, mode)

    @contextlib.contextmanager
    def _taking(self, url: str) -> Iterator[None]:
        """The engine goes over to what it staged. When that fails it may have mapped either."""
        staged = self._staged.get(url, set())
        self._serving[url] = self._serving.get(url, set()) | staged
        yield
        self._serving[url], self._staged[url] = staged, set()

    async def discard(self, url: str, published: Published) -> None:
        await self._engines.discard(url, published.version)
        self._staged[url] = set()

    async def close(self) -> None:
        await self._engines.close()
        for replica in self._replicas:
            replica.remove()
        self._replicas.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._chain.directory.is_dir():
            self._chain.unregister(self._name)

    def _materialise(self, published: Published) -> tuple[Entry, Path]:
        """A file that holds the version: the one that does already, or one that nobody has mapped."""
        sequence = int(str(published.address["sequence"]))
        wanted = Reference(sequence=sequence, digest=str(published.address["digest"]))
        for replica in self._replicas:
            if replica.held == wanted:
                return self._chain.entry(sequence), replica.path
        replica = self._free()
        entry = replica.bring(self._chain, sequence)
        if entry.reference != wanted:
            raise PublishError(f"entry {sequence} of {self._chain.directory} is not the one that the trainer wrote")
        oldest = min(r.held.sequence for r in self._replicas if r.held is not None)
        self._chain.register(self._name, oldest, self._config.lease)
        return entry, replica.path

    def _free(self) -> Replica:
        mapped: set[Path] = set().union(*self._serving.values(), *self._staged.values())
        free = [replica for replica in self._replicas if replica.path not in mapped]
        for spare in free[1:]:
            self._replicas.remove(spare)
            spare.remove()
        if free:
            return free[0]
        if self._lock is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            refusal = "another run keeps its replicas there; give each run its own [transport] replicas"
            self._lock = DirectoryLock(self._directory / "controller.lock", refusal)
            for left in self._directory.glob(f"*{_PREFIX}*"):  # by a controller that was killed
                left.unlink()
        self._made += 1
        replica = Replica(self._directory / f"{_PREFIX}{self._made}", threads=self._config.threads)
        self._replicas.append(replica)
        return replica


class DiskDeltaTransport(WeightTransport[DiskDeltaConfig]):
    """A chain of deltas on a shared file system: about one byte in a hundred is moved."""

    Config = DiskDeltaConfig
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key="engine.use",
            values=("sglang",),
            reason="SGLang cannot hold a version beside the one in use, and reads whole checkpoints from disk; use "
            'transport = "broadcast"',
        ),
        Conflict(
            key="engine.colocated",
            values=(True,),
            reason="trainer and engine share a device and its memory: handing over a pointer beats every file; use "
            'transport = "shared_memory"',
        ),
        Conflict(
            key="engine.disaggregation",
            values=("prefill", "decode", True),
            reason="prefill and decode servers switch at different moments, and keys and values of one version would "
            'be read under another; use transport = "broadcast"',
        ),
        Conflict(
            key="backend.lora",
            values=(),
            reason="merged adapters move nearly every weight of their layers at every step, so that a delta is as "
            'large as the model; use transport = "shared_memory" or "broadcast"',
        ),
    )

    def sender(self, run_directory: Path) -> DiskDeltaSender:
        return DiskDeltaSender(self.config, run_directory)

    def receiver(self, run_directory: Path) -> DiskDeltaReceiver:
        return DiskDeltaReceiver(self.config, run_directory)
