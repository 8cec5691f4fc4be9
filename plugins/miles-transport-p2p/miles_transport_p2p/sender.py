"""The trainer's end: one registered buffer, and writes from it to whichever targets the controller names."""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.transports import Published, TensorInfo, WeightSender
from miles_core.errors import PublishError
from miles_core.sync.plan import described, host_bytes
from miles_core.sync.shared_buffers import InOrder, copy_and_check
from miles_core.sync.staging import aligned, aligned_offsets
from miles_transport_p2p.control import ControlServer
from miles_transport_p2p.libraries import Library, Span, open_library, rdma_adapters
from miles_transport_p2p.region import Region

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.backends import WeightStream

__all__ = ["P2PSender"]

_VERSIONS = 2
_AT_A_TIME = 2


class _Lease:
    """A slot at a target that may be written ahead of the controller's asking: its engine maps another."""

    def __init__(self, peer: Mapping[str, str], address: int, nbytes: int) -> None:
        self.peer = peer
        self.address = address
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self.version: int | None = None
        self.sent = 0
        self.failure: PublishError | None = None


class P2PSender(WeightSender):
    """The buffer holds the last two versions, each in its half, and is registered once, whatever the number of targets.

    Targets that took the version before have lent their next slot already: while a bucket goes out to them, the next
    is gathered. Others get everything when the controller names them. Two targets are written ahead at a time, in turn:
    whoever has everything is verified while the next ones are written to, and one that hangs holds nobody up.
    """

    def __init__(self, *, library: str, host: str, bucket_bytes: int, timeout: float, require_rdma: bool) -> None:
        self._library: Library = open_library(library, host)
        if require_rdma and self._library.protocol != "rdma":
            raise PublishError(
                f"transport.require_rdma: {self._library.name} goes over {self._library.protocol}; RDMA adapters here: "
                f"{', '.join(rdma_adapters()) or 'none'}"
            )
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._region: Region | None = None
        self._halves: dict[int, tuple[int, int]] = {}  # version: (offset, bytes)
        self._leases: dict[str, _Lease] = {}
        self._lock = threading.Lock()
        self._ahead = _Pipeline(self._library, (), 0, 0, timeout)
        self._token = secrets.token_hex(16)
        self._name = f"publisher-{uuid.uuid4().hex[:12]}"
        self._control = ControlServer(host, self._token, {"/write": self._write, "/lend": self._lend})
        self._closed = False

    @property
    def registered_bytes(self) -> int:
        """Of the buffer."""
        return 0 if self._region is None else self._region.nbytes

    def send(self, version: int, weights: WeightStream) -> Published:
        begin = time.perf_counter()
        held: list[Any] = []
        self._ahead.join()  # nothing of the version before is on its way any more
        with self._lock:
            leases = list(self._leases.values())
        if self._region is None:  # the first version says how large one is
            held = list(weights)
            _, nbytes = aligned_offsets(tensor.numel() * tensor.element_size() for _, tensor in held)
            half = max(nbytes + -nbytes % 4096, 4096)
            self._region = Region(half * _VERSIONS)
            self._library.register(self._region.address, self._region.nbytes)
        half = self._region.nbytes // _VERSIONS
        taken = [offset for v, (offset, _) in self._halves.items() if v != version]
        start = self._halves.pop(version, (0, 0))[0] if version in self._halves else half if 0 in taken[-1:] else 0
        self._halves = {v: place for v, place in self._halves.items() if place[0] != start}
        pipeline = _Pipeline(self._library, leases, version, self._region.address + start, self._timeout)
        self._ahead = pipeline
        position = sent = 0
        try:
            with InOrder[TensorInfo]() as threads:
                for name, tensor in held or weights:
                    data = host_bytes(tensor)
                    position = aligned(position)
                    if position + len(data) > half:
                        raise PublishError(f"version {version} is larger than the one before: {name} has no room")
                    target = self._region.view[start + position : start + position + len(data)]
                    threads.put(len(data), _fill, name, tensor, data, target)
                    position += len(data)
                    if position - sent >= self._bucket_bytes:
                        threads.wait()
                        pipeline.put(sent, position)
                        sent = position
                tensors = threads.results()
            pipeline.put(sent, position)
        finally:
            pipeline.close()  # those who write ahead end by themselves; `_write` waits for its target's
        self._halves[version] = (start, position)
        address = {"control": self._control.url, "token": self._token, "publisher": self._name}
        address |= {"library": self._library.name, "protocol": self._library.protocol}
        return Published(version=version, tensors=tuple(tensors), address=address, seconds=time.perf_counter() - begin)

    def _lend(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Remember the next slot of a target."""
        with self._lock:
            self._leases[body["target"]] = _Lease(body["endpoint"], int(body["address"]), int(body["nbytes"]))
        return {}

    def _write(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Bring a version to a target: what was not written ahead. Raises `PublishError`."""
        version, target = int(body["version"]), str(body["target"])
        with self._lock:
            lease = self._leases.pop(target, None)
            place = self._halves.get(version)
        if place is None or self._region is None:
            raise PublishError(f"version {version} is no longer held; the trainer holds {sorted(self._halves)}")
        address = int(body["address"])
        if lease is not None and lease.address == address and lease.version == version:
            with lease.lock:
                if lease.failure is not None:
                    raise lease.failure
                if lease.sent >= place[1]:
                    return {"ahead": True}
        spans = _spans(self._region.address + place[0], address, 0, place[1], self._bucket_bytes)
        begin = time.perf_counter()
        self._library.write(body["endpoint"], spans, self._timeout)
        return {"ahead": False, "seconds": time.perf_counter() - begin}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._control.close()
        self._ahead.close()
        self._ahead.join()
        if self._region is not None:
            self._library.unregister(self._region.address, self._region.nbytes)
            self._region.close()
            self._region = None
        self._library.close()


def _fill(name: str, tensor: torch.Tensor, data: memoryview, target: memoryview) -> TensorInfo:
    with target:  # a region is not closed while a view of it lives
        return described(name, tensor, copy_and_check(data, target))


def _spans(here: int, there: int, start: int, end: int, size: int) -> list[Span]:
    return [(here + at, there + at, min(size, end - at)) for at in range(start, end, size)]


class _Pipeline:
    """Writes ranges of a version to leased slots, in order, beside the one who fills them. It has all leases from the
    start, and waits for the rest of them when the buffer's half is to be filled again."""

    def __init__(self, library: Library, leases: Sequence[_Lease], version: int, here: int, timeout: float) -> None:
        self._threads: list[threading.Thread] = []
        self._turns = threading.Semaphore(_AT_A_TIME)
        self._ready = threading.Condition()
        self._end = 0
        self._closed = False
        for lease in leases:
            lease.lock.acquire()  # until all of it is there, or has failed
            lease.version, lease.sent = version, 0
            thread = threading.Thread(target=self._follow, args=(library, lease, here, timeout))
            thread.start()
            self._threads.append(thread)

    def put(self, start: int, end: int) -> None:
        """The bytes up to `end` are there."""
        with self._ready:
            self._end = end
            self._ready.notify_all()

    def close(self) -> None:
        """Nothing is added any more."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def join(self) -> None:
        """Nothing is written any more."""
        for thread in self._threads:
            thread.join()

    def _follow(self, library: Library, lease: _Lease, here: int, timeout: float) -> None:
        try:
            with self._turns:
                if lease.failure is None:
                    self._write(library, lease, here, timeout)
        except PublishError as failure:
            lease.failure = failure  # told when the controller asks for the version
        finally:
            lease.lock.release()

    def _write(self, library: Library, lease: _Lease, here: int, timeout: float) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._closed or self._end > lease.sent)
                end = min(self._end, lease.nbytes)
            if end <= lease.sent:
                return
            library.write(lease.peer, _spans(here, lease.address, lease.sent, end, end - lease.sent), timeout)
            lease.sent = end
