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
from miles_core.sync.plan import describe, host_bytes
from miles_core.sync.staging import aligned, aligned_offsets
from miles_transport_p2p.control import ControlServer
from miles_transport_p2p.libraries import Library, Span, open_library, rdma_adapters
from miles_transport_p2p.region import Region

if TYPE_CHECKING:
    from miles_core.contracts.backends import WeightStream

__all__ = ["P2PSender"]

_VERSIONS = 2


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
    is gathered. Others get everything when the controller names them.
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
        tensors: list[TensorInfo] = []
        held: list[Any] = []
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
        position = sent = 0
        try:
            for name, tensor in held or weights:
                data = host_bytes(tensor)
                position = aligned(position)
                if position + len(data) > half:
                    raise PublishError(f"version {version} is larger than the one before: {name} has no room")
                self._region.view[start + position : start + position + len(data)] = data
                tensors.append(describe(name, tensor))
                position += len(data)
                if position - sent >= self._bucket_bytes:
                    pipeline.put(sent, position)
                    sent = position
            pipeline.put(sent, position)
        finally:
            pipeline.close()
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
        if self._region is not None:
            self._library.unregister(self._region.address, self._region.nbytes)
            self._region.close()
            self._region = None
        self._library.close()


def _spans(here: int, there: int, start: int, end: int, size: int) -> list[Span]:
    return [(here + at, there + at, min(size, end - at)) for at in range(start, end, size)]


class _Pipeline:
    """Writes ranges of a version to leased slots, in order, beside the one who fills them."""

    def __init__(self, library: Library, leases: Sequence[_Lease], version: int, here: int, timeout: float) -> None:
        self._threads: list[threading.Thread] = []
        self._ready = threading.Condition()
        self._end = 0
        self._closed = False
        for lease in leases:
            thread = threading.Thread(target=self._follow, args=(library, lease, version, here, timeout))
            thread.start()
            self._threads.append(thread)

    def put(self, start: int, end: int) -> None:
        """The bytes up to `end` are there."""
        with self._ready:
            self._end = end
            self._ready.notify_all()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _follow(self, library: Library, lease: _Lease, version: int, here: int, timeout: float) -> None:
        with lease.lock:
            lease.version, lease.sent = version, 0
            while lease.failure is None:
                with self._ready:
                    self._ready.wait_for(lambda: self._closed or self._end > lease.sent)
                    end = min(self._end, lease.nbytes)
                if end <= lease.sent:
                    return
                try:
                    library.write(lease.peer, _spans(here, lease.address, lease.sent, end, end - lease.sent), timeout)
                except PublishError as failure:
                    lease.failure = failure  # told when the controller asks for the version
                    return
                lease.sent = end
