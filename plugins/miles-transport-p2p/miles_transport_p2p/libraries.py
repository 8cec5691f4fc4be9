"""The transfer libraries behind one interface: register memory, say where it is, write into a peer's.

Found at start, NIXL first: on one host it copies through shared memory, where Mooncake goes through TCP. A write that
raises leaves the contents of the target unknown, and it may go on changing: its memory is never used again.
"""

from __future__ import annotations

import abc
import base64
import importlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from miles_core.errors import PublishError

__all__ = ["LIBRARIES", "Library", "Span", "installed", "open_library", "rdma_adapters"]

Span = tuple[int, int, int]
"""(address here, address at the peer, bytes)."""

_MAXIMUM_ENTRIES = 1024
"""Of one batch. Mooncake fails above 2,048."""

_POLL = 0.0002

_ANSWER = 0.005
"""Seconds between two looks for new peers, on one host."""

_MODULES = {"nixl": ("nixl_cu12._bindings", "nixl_cu13._bindings"), "mooncake": ("mooncake.engine",)}


def rdma_adapters() -> list[str]:
    """Names of the RDMA adapters that the kernel shows."""
    directory = Path("/sys/class/infiniband")
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


class Library(abc.ABC):
    """One end of one library, in this process. Calls may come from several threads."""

    name: ClassVar[str]

    def __init__(self, host: str) -> None:
        self.host = host

    @property
    @abc.abstractmethod
    def protocol(self) -> str:
        """What bytes go over: `rdma`, `tcp`, or `local`; never what was asked for. Mooncake tells which adapters it has
        found; of NIXL it is inferred from those that the host has: it names its plugin (UCX), not what UCX takes."""

    @abc.abstractmethod
    def register(self, address: int, nbytes: int) -> None: ...

    @abc.abstractmethod
    def unregister(self, address: int, nbytes: int) -> None: ...

    @abc.abstractmethod
    def endpoint(self) -> dict[str, str]:
        """What a peer needs to write here; JSON-able. Ask anew after each registration."""

    @abc.abstractmethod
    def write(self, peer: Mapping[str, str], spans: Sequence[Span], timeout: float) -> None:
        """Write to the peer's registered memory, and return when all of it is there. Raises `PublishError`."""

    @abc.abstractmethod
    def forget(self, peer: Mapping[str, str]) -> None:
        """Drop what is known of a peer: one that comes back is another. Idempotent."""

    def close(self) -> None:
        """Default: nothing."""


class Nixl(Library):
    """NIXL over UCX."""

    name = "nixl"

    def __init__(self, host: str) -> None:
        super().__init__(host)
        api = _nixl()
        local = self.protocol == "local"
        configuration = api.nixl_agent_config(
            backends=["UCX"], enable_prog_thread=not local, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._agent = api.nixl_agent(f"miles-{uuid.uuid4().hex}", configuration)
        if "UCX" not in self._agent.backends:
            raise PublishError("NIXL has no UCX plugin here, the only one that writes from memory to memory")
        self._registered: dict[int, Any] = {}
        self._peers: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if local:
            threading.Thread(target=self._answer_peers, name="nixl-progress", daemon=True).start()

    def _answer_peers(self) -> None:
        """On one host all that a target does for a transfer is to answer a new peer; the writer copies. NIXL's own
        progress thread polls for it with a third of a core, in every process, and that is what slows the copies."""
        while not self._closed.wait(_ANSWER):
            with self._lock:
                self._agent.get_new_notifs()

    def close(self) -> None:
        self._closed.set()

    @property
    def protocol(self) -> str:
        return "rdma" if rdma_adapters() else "local" if self.host in ("127.0.0.1", "localhost") else "tcp"

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._registered[address] = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")

    def unregister(self, address: int, nbytes: int) -> None:
        with self._lock:
            if (handle := self._registered.pop(address, None)) is not None:
                self._agent.deregister_memory(handle)

    def endpoint(self) -> dict[str, str]:
        with self._lock:
            metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"agent": self._agent.name, "metadata": metadata}

    def write(self, peer: Mapping[str, str], spans: Sequence[Span], timeout: float) -> None:
        limit = time.monotonic() + timeout  # NIXL has no deadline: a peer that is gone is waited for, over TCP
        handle = None
        try:
            with self._lock:
                name = self._known(peer)
                local = self._agent.get_xfer_descs([(here, size, 0) for here, _, size in spans], "DRAM")
                remote = self._agent.get_xfer_descs([(there, size, 0) for _, there, size in spans], "DRAM")
                handle = self._agent.initialize_xfer("WRITE", local, remote, name)
                state = self._agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > limit:
                    raise PublishError(f"NIXL had not written to {name} after {timeout:g} s")
                time.sleep(_POLL)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise PublishError(f"NIXL: writing to {name} ended as {state}")
        except PublishError:
            self.forget(peer)
            raise
        except Exception as error:  # the bindings raise classes of their own
            self.forget(peer)
            raise PublishError(f"NIXL: {type(error).__name__}: {error}") from error
        finally:
            if handle is not None:
                self._agent.release_xfer_handle(handle)

    def _known(self, peer: Mapping[str, str]) -> str:
        """The peer's name, once its metadata are loaded: anew when it has registered other memory since."""
        name, metadata = peer["agent"], peer["metadata"]
        if self._peers.get(name) != metadata:
            if name in self._peers:
                self._agent.remove_remote_agent(name)
            self._agent.add_remote_agent(base64.b64decode(metadata))
            self._peers[name] = metadata
        return name

    def forget(self, peer: Mapping[str, str]) -> None:
        with self._lock:
            if self._peers.pop(peer["agent"], None) is not None:
                self._agent.remove_remote_agent(peer["agent"])


class Mooncake(Library):
    """Mooncake Transfer Engine, peers found without a metadata server (`P2PHANDSHAKE`)."""

    name = "mooncake"

    def __init__(self, host: str) -> None:
        super().__init__(host)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        asked = "rdma" if rdma_adapters() else "tcp"
        if code := self._engine.initialize(host, "P2PHANDSHAKE", asked, ""):
            raise PublishError(f"Mooncake could not start on {host} with {asked} (code {code})")
        # Asked for "rdma" without an adapter that it can open, it silently takes TCP: its topology is empty then.
        topology: dict[str, list[list[str]]] = json.loads(self._engine.get_local_topology())
        found = any(adapters for ranked in topology.values() for adapters in ranked)
        self._protocol = asked if found else "tcp"

    @property
    def protocol(self) -> str:
        return self._protocol

    def register(self, address: int, nbytes: int) -> None:
        if code := self._engine.register_memory(address, nbytes):
            raise PublishError(f"Mooncake could not register {nbytes} bytes (code {code}); see `ulimit -l`")

    def unregister(self, address: int, nbytes: int) -> None:
        self._engine.unregister_memory(address)

    def endpoint(self) -> dict[str, str]:
        return {"segment": f"{self.host}:{self._engine.get_rpc_port()}"}

    def write(self, peer: Mapping[str, str], spans: Sequence[Span], timeout: float) -> None:
        # A port says whether somebody is there at once; the library would try for long.
        host, _, port = peer["segment"].rpartition(":")
        try:
            socket.create_connection((host, int(port)), min(timeout, 10.0)).close()
        except OSError as error:
            raise PublishError(f"Mooncake: nobody is at {peer['segment']}: {error}") from error
        for start in range(0, len(spans), _MAXIMUM_ENTRIES):
            here, there, sizes = zip(*spans[start : start + _MAXIMUM_ENTRIES], strict=True)
            code = self._engine.batch_transfer_sync_write(peer["segment"], list(here), list(there), list(sizes))
            if code:
                raise PublishError(f"Mooncake: writing to {peer['segment']} failed (code {code})")

    def forget(self, peer: Mapping[str, str]) -> None:
        """A segment is looked up by its port; one that comes back has another."""


def _nixl() -> Any:
    """The bindings, of whichever build is installed."""
    build = next(m for m in _MODULES["nixl"] if not _loadable(m))
    return importlib.import_module(build.replace("_bindings", "_api"))


LIBRARIES: dict[str, type[Library]] = {"nixl": Nixl, "mooncake": Mooncake}


def installed() -> dict[str, str]:
    """Of each library: the empty string when it can be loaded, else why not."""
    return {name: _loadable(*modules) for name, modules in _MODULES.items()}


def _loadable(*modules: str) -> str:
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except ImportError as error:  # a shared library is missing: libibverbs1
            return str(error)
        return ""
    return f"no module {' or '.join(modules)}"


def open_library(name: str, host: str) -> Library:
    """Open `name`, or with `auto` the first that can be. Raises `PublishError` with what is wrong with each."""
    wrong = []
    for candidate in LIBRARIES if name == "auto" else (name,):
        why = _loadable(*_MODULES[candidate])
        if not why:
            return LIBRARIES[candidate](host)
        wrong.append(f"{candidate}: {why}")
    raise PublishError(
        f"no transfer library can be loaded ({'; '.join(wrong)}). Install one: pip install --no-deps nixl-cu12, "
        "or mooncake-transfer-engine-non-cuda with Debian's libibverbs1"
    )
