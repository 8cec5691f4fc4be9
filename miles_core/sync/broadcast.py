"""The `broadcast` transport: a process group of trainer rank 0 and the engines; full buckets to all of them at once.

Engines are told over HTTP, in SGLang's protocol: `/init_weights_update_group`, `/begin_weight_update`, one
`/update_weights_from_distributed` a bucket (`flattened_bucket`: one broadcast of bytes), `/end_weight_update`,
`/update_weight_version`. The trainer gathers one tensor at a time and holds two buckets, one that is sent and one that
is filled meanwhile; it goes through its weights twice, for the checksums before the pause and for the bytes in it.

A group has a fixed set of members. It is kept from publish to publish, and built anew for whoever is left when a member
was lost, or is new.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Conflict
from miles_core.contracts.transports import Published, TensorInfo, WeightReceiver, WeightSender, WeightTransport
from miles_core.errors import EngineError, PublishError
from miles_core.http import JsonHttp
from miles_core.process_groups import broadcast, join_group, leave_group, open_store
from miles_core.sync.buckets import BUCKET_BYTES, Bucket, buckets_of
from miles_core.sync.plan import describe, host_bytes
from miles_core.sync.shared_buffers import InOrder

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from miles_core.contracts.backends import WeightStream

__all__ = ["BroadcastConfig", "BroadcastTransport"]

_SPARE_STORES = 2
"""A store at which a group could not be built is closed; the second attempt of a publish meets at another."""

_SPARE_BUCKETS = 2


class BroadcastConfig(ComponentConfig):
    """Full buckets over gloo or NCCL."""

    bucket_mb: int = Field(default=BUCKET_BYTES >> 20, ge=1)
    """MiB of a bucket."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of the process group. `auto`: `nccl` where the trainer's weights are on a GPU, else `gloo`."""

    host: str = "127.0.0.1"
    """Address of the trainer's host, as the engines reach it."""

    join_timeout: float = Field(default=60.0, gt=0)
    """Seconds that members are waited for when a group is built."""

    timeout: float = Field(default=300.0, gt=0)
    """Seconds that one bucket may take."""


class BroadcastSender(WeightSender):
    """Rank 0 of the group."""

    def __init__(self, config: BroadcastConfig) -> None:
        self._config = config
        self._stores: dict[int, Any] = {}
        self._group: tuple[str, ProcessGroup] | None = None
        self._spare: list[torch.Tensor] = []  # memory of buckets, from publish to publish

    def send(self, version: int, weights: WeightStream) -> Published:
        begin = time.perf_counter()
        backend = self._config.backend
        with InOrder[TensorInfo]() as threads:
            for name, tensor in weights:
                if backend == "auto":
                    backend = "nccl" if tensor.is_cuda else "gloo"
                threads.put(tensor.nbytes, describe, name, tensor)
            tensors = threads.results()
        while len(self._stores) < _SPARE_STORES:
            store, port = open_store(self._config.host, timeout=self._config.join_timeout)
            self._stores[port] = store
        return Published(
            version=version,
            tensors=tuple(tensors),
            address={"host": self._config.host, "ports": list(self._stores), "backend": backend},
            seconds=time.perf_counter() - begin,
        )

    def transfer(self, published: Published, weights: WeightStream, session: Mapping[str, object]) -> None:
        try:
            self._send_buckets(self._join(published, session), published, weights)
        except RuntimeError as error:
            self._leave()
            raise PublishError(f"broadcasting version {published.version}: {error}") from error

    def _join(self, published: Published, session: Mapping[str, object]) -> ProcessGroup:
        name = str(session["group"])
        if self._group is not None and self._group[0] == name:
            return self._group[1]
        self._leave()
        port = int(str(session["port"]))
        try:
            group = join_group(
                name,
                host=self._config.host,
                port=port,
                rank=0,
                size=int(str(session["size"])),
                backend=str(published.address["backend"]),
                timeout=self._config.timeout,
                store=self._stores[port],
            )
        except RuntimeError:
            self._stores.pop(port)  # those who still wait there learn that nobody comes
            raise
        self._group = (name, group)
        return group

    def _send_buckets(self, group: ProcessGroup, published: Published, weights: WeightStream) -> None:
        """Fill buckets as the stream comes, and send each when it is full, in the order that the engines expect. One is
        on its way while the next is filled."""
        buckets = buckets_of(published.tensors, self._config.bucket_mb << 20)
        where = {tensor.name: index for index, bucket in enumerate(buckets) for tensor in bucket}
        filling: dict[int, _Filling] = {}
        due = 0
        sending: tuple[Future[None], _Filling] | None = None
        with ThreadPoolExecutor(1, "broadcast") as pool:
            for name, tensor in weights:
                index = where[name]
                if index not in filling:
                    filling[index] = _Filling(buckets[index], published, self._spare)
                filling[index].put(name, tensor)
                while due in filling and filling[due].complete:
                    self._sent(sending)
                    bucket = filling.pop(due)
                    sending = pool.submit(broadcast, group, bucket.data), bucket
                    due += 1
            self._sent(sending)
        if due != len(buckets):
            left = [name for index in range(due, len(buckets)) for name in _missing(buckets[index], filling.get(index))]
            raise PublishError(f"version {published.version}: the weights no longer have {', '.join(left[:5])}")

    def _sent(self, sending: tuple[Future[None], _Filling] | None) -> None:
        """Wait for it, and keep its memory."""
        if sending is not None:
            sending[0].result()
            self._spare = [*self._spare, sending[1].memory][-_SPARE_BUCKETS:]

    def _leave(self) -> None:
        if self._group is not None:
            group, self._group = self._group[1], None
            leave_group(group)

    def close(self) -> None:
        self._leave()
        self._stores.clear()
        self._spare.clear()


class _Filling:
    """A bucket's bytes while they come together: uint8, on the device of the group."""

    def __init__(self, bucket: Bucket, published: Published, spare: list[torch.Tensor]) -> None:
        import torch

        self._spans: dict[str, tuple[int, int]] = {}
        offset = 0
        for tensor in bucket:
            self._spans[tensor.name] = (offset, offset + tensor.nbytes)
            offset += tensor.nbytes
        device = "cuda" if published.address["backend"] == "nccl" else "cpu"
        fitting = [m for m in spare if m.numel() >= offset and m.device.type == device]
        self.memory = fitting[0] if fitting else torch.empty(offset, dtype=torch.uint8, device=device)
        """Taken from `spare`, where one of them is large enough."""
        spare[:] = [m for m in spare if m is not self.memory]
        self.data = self.memory[:offset]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        import torch

        start, stop = self._spans.pop(name)
        if self.data.is_cuda:
            self.data[start:stop].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        else:  # the C library's copy goes around the cache where it is large, and is faster than torch's
            np.copyto(self.data[start:stop].numpy(), np.asarray(host_bytes(tensor)))

    @property
    def complete(self) -> bool:
        return not self._spans

    @property
    def missing(self) -> list[str]:
        return list(self._spans)


def _missing(bucket: Bucket, filling: _Filling | None) -> list[str]:
    return [tensor.name for tensor in bucket] if filling is None else filling.missing


class BroadcastReceiver(WeightReceiver):
    """Tells the engines to join, to receive each bucket, and which version they hold."""

    in_place = True

    def __init__(self, config: BroadcastConfig) -> None:
        self._config = config
        # The sender gives up first, and closes the group: then those who still wait in it can answer.
        self._http = JsonHttp(deadline=config.timeout + config.join_timeout)
        self._session: dict[str, object] | None = None
        self._failed_ports: set[object] = set()
        self._ranks: dict[str, int] = {}
        self._joined: dict[str, str] = {}
        self._begun: set[str] = set()
        self._refused: dict[str, PublishError] = {}

    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        """Nothing can be moved before the pause, but names can be compared, when they meet."""
        if url in self._joined:
            return {}
        found = await self._post(url, "/weights_checker", {"action": "checksum"}, what="comparing names")
        ranks = found.get("ranks")
        held = (ranks[0] if ranks else found).get("checksums") or {}
        missing, unknown = published.checksums.keys() - held.keys(), held.keys() - published.checksums.keys()
        if held and (missing or unknown):
            raise PublishError(
                f"the engine's model has other tensors than the trainer's: {_some('only the trainer has', missing)}"
                f"{_some('only the engine has', unknown)}"
            )
        return {}

    async def connect(self, urls: Sequence[str], published: Published) -> Mapping[str, object]:
        opened = await asyncio.gather(*(self._begin(url) for url in urls), return_exceptions=True)
        self._refused = {u: r for u, r in zip(urls, opened, strict=True) if isinstance(r, PublishError)}
        urls = [url for url in urls if url not in self._refused]
        if self._session is None or sorted(self._ranks) != sorted(urls):
            await asyncio.gather(*(self._destroy(url) for url in list(self._joined)))
            self._ranks = {url: rank for rank, url in enumerate(urls, 1)}
            ports = published.address["ports"]
            assert isinstance(ports, list)
            port = next((port for port in ports if port not in self._failed_ports), ports[-1])
            self._session = {"group": f"miles-{uuid.uuid4().hex}", "size": len(urls) + 1, "port": port}
        return self._session

    async def receive(self, url: str, published: Published, session: Mapping[str, object]) -> None:
        if url in self._refused:
            raise self._refused[url]
        group = str(session["group"])
        if self._joined.get(url) != group:
            self._joined[url] = group
            await self._post(
                url,
                "/init_weights_update_group",
                {
                    "master_address": published.address["host"],
                    "master_port": session["port"],
                    "rank_offset": self._ranks[url],
                    "world_size": session["size"],
                    "group_name": group,
                    "backend": published.address["backend"],
                },
                what="joining the group",
            )
        for bucket in buckets_of(published.tensors, self._config.bucket_mb << 20):
            body = {
                "names": [tensor.name for tensor in bucket],
                "dtypes": [tensor.dtype for tensor in bucket],
                "shapes": [list(tensor.shape) for tensor in bucket],
                "group_name": group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            await self._post(url, "/update_weights_from_distributed", body, what=f"receiving {bucket[0].name} and on")
        await self._post(url, "/end_weight_update", {}, what="closing the update")
        self._begun.discard(url)

    async def _begin(self, url: str) -> None:
        """Open an update; one that an earlier failure of ours left open is closed first."""
        if url in self._begun and await self._best_effort(url, "/end_weight_update", {}):
            self._begun.discard(url)
        await self._post(url, "/begin_weight_update", {}, what="opening the update")
        self._begun.add(url)

    async def commit(self, url: str, published: Published) -> None:
        body = {"new_version": str(published.version), "abort_all_requests": False}
        await self._post(url, "/update_weight_version", body, what="taking the version's number")

    async def discard(self, url: str, published: Published) -> None:
        """Close what is open at the engine, and leave the group: it is of no use after a failure."""
        if self._session is not None:
            self._failed_ports.add(self._session["port"])
            self._session = None
        if url in self._begun and await self._best_effort(url, "/end_weight_update", {}):
            self._begun.discard(url)
        await self._destroy(url)

    async def _destroy(self, url: str) -> None:
        group = self._joined.pop(url, None)
        if group is not None:
            await self._best_effort(url, "/destroy_weights_update_group", {"group_name": group})

    async def _best_effort(self, url: str, path: str, body: Mapping[str, Any]) -> bool:
        """Whether it worked. An engine that cannot do it is refused, or drained, by what comes next."""
        try:
            await self._http.call("POST", url + path, body, deadline=min(10.0, self._config.timeout))
        except EngineError:
            return False
        return True

    async def _post(self, url: str, path: str, body: Mapping[str, Any], *, what: str) -> Mapping[str, Any]:
        try:
            answer = await self._http.call("POST", url + path, body, once=True)
        except EngineError as error:
            raise PublishError(f"{what}: {error}") from error
        if not isinstance(answer, dict):
            raise PublishError(f"{what}: {url}{path} answered {str(answer)[:200]}")
        return answer

    async def close(self) -> None:
        await self._http.close()


def _some(what: str, names: set[str]) -> str:
    return f"{what} {', '.join(sorted(names)[:5])} ({len(names)} in all). " if names else ""


class BroadcastTransport(WeightTransport[BroadcastConfig]):
    """One group of trainer and engines; the baseline that everything else is measured against."""

    Config = BroadcastConfig
    conflicts: ClassVar[tuple[Conflict, ...]] = ()

    def sender(self, run_directory: Path) -> BroadcastSender:
        return BroadcastSender(self.config)

    def receiver(self, run_directory: Path) -> BroadcastReceiver:
        return BroadcastReceiver(self.config)
