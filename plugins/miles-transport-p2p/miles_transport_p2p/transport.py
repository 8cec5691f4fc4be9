"""The `p2p` transport: what the controller does, and the component.

A version is staged: the trainer writes it into memory that an agent beside the engine has registered, and the engine
maps that memory and verifies every tensor there, in its two-phase protocol. The engine keeps the version before until
it switches.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Conflict, Example, Workbench
from miles_core.contracts.transports import Published, WeightReceiver, WeightTransport
from miles_core.errors import EngineError, EngineUnavailable, PublishError
from miles_core.http import JsonHttp
from miles_core.sync.staging import StagingEngines, aligned_offsets
from miles_transport_p2p.libraries import installed
from miles_transport_p2p.plan import assign
from miles_transport_p2p.sender import P2PSender

if TYPE_CHECKING:
    from miles_core.contracts.engines import PauseMode

__all__ = ["P2PConfig", "P2PReceiver", "P2PTransport"]

_ATTEMPTS = 3
"""Of one transfer to one engine; each into memory of its own."""


class P2PConfig(ComponentConfig):
    """One-sided writes into the engines' registered memory."""

    library: Literal["auto", "nixl", "mooncake"] = "auto"
    """`auto`: NIXL where it is installed, else Mooncake."""

    host: str = "127.0.0.1"
    """Address of the trainer's host, as the engines' hosts reach it."""

    agents: dict[str, str] = Field(default_factory=dict)
    """URL of the agent by engine URL, for engines on other hosts; started there by hand, with the run's
    MILES_P2P_TOKEN. Engines that are not named get an agent on this host."""

    bucket_mb: int = Field(default=64, ge=1)
    """MiB of one write."""

    timeout: float = Field(default=120.0, gt=0)
    """Seconds that a transfer to one engine may take."""

    require_rdma: bool = False
    """Refuse to start over anything else. Otherwise the protocol in use is only reported."""


class _Target:
    """One engine's agent, and the slot that it last lent."""

    def __init__(self, url: str, token: str, process: asyncio.subprocess.Process | None) -> None:
        self.url = url
        self.token = token
        self.process = process
        self.slot: dict[str, Any] | None = None


class P2PReceiver(WeightReceiver):
    """Asks agents for memory, the trainer to write to it, and engines to map it."""

    atomic = True

    def __init__(self, config: P2PConfig) -> None:
        self._config = config
        self._http = JsonHttp(deadline=config.timeout + 60.0)
        self._engines = StagingEngines()
        self._targets: dict[str, _Target] = {}
        self._starting = asyncio.Lock()
        self.protocols: dict[str, str] = {}
        """By engine URL: the library and the protocol in use, as its agent reports them."""

    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        last: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                target = await self._target(url, str(published.address["library"]))
                return await self._stage(url, target, published)
            except PublishError as error:
                last = error
                await self._drop(url)
        raise PublishError(f"version {published.version}, sent {_ATTEMPTS} times: {last}") from last

    async def _stage(self, url: str, target: _Target, published: Published) -> Mapping[str, str]:
        starts, nbytes = aligned_offsets(t.nbytes for t in published.tensors)
        slot = target.slot or await self._lend(url, target, published, nbytes)
        if slot["protocol"] != "rdma" and self._config.require_rdma:
            raise PublishError(f"transport.require_rdma: the agent of {url} goes over {slot['protocol']}")
        (source,) = assign({"all": nbytes}, {str(published.address["control"]): ["all"]}, {url: ["all"]})
        body = {"target": url, "version": published.version, "endpoint": slot["endpoint"], "address": slot["address"]}
        await self._call(f"{source.source}/write", str(published.address["token"]), body, "writing")
        return await self._engines.stage(url, slot["path"], published.tensors, starts, published.version)

    async def _lend(self, url: str, target: _Target, published: Published, nbytes: int) -> dict[str, Any]:
        body = {"nbytes": nbytes, "owner": published.address["publisher"]}
        slot = target.slot = dict(await self._agent(target, "/prepare", body, "asking for memory"))
        self.protocols[url] = f"{slot['library']} over {slot['protocol']}"
        return slot

    async def _target(self, url: str, library: str) -> _Target:
        """The engine's agent; a new one where it has ended."""
        async with self._starting:
            target = self._targets.get(url)
            if target is not None and (target.process is None or target.process.returncode is None):
                return target
            if url in self._config.agents:
                token = os.environ.get("MILES_P2P_TOKEN", "")
                target = _Target(self._config.agents[url].rstrip("/"), token, None)
            elif urlsplit(url).hostname in ("127.0.0.1", "localhost", self._config.host):
                target = await self._start(library)
            else:
                raise PublishError(
                    f"{url} is on another host: start an agent there (python -m miles_transport_p2p.agent), and name "
                    "it in [transport.agents]"
                )
            self._targets[url] = target
            return target

    async def _start(self, library: str) -> _Target:
        token = secrets.token_hex(16)
        command = [sys.executable, "-m", "miles_transport_p2p.agent", "--with-parent", "--library", library]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "MILES_P2P_TOKEN": token},
        )
        assert process.stdout is not None, "asked for above"
        line = await asyncio.wait_for(process.stdout.readline(), 60.0)
        if not line:
            raise PublishError(f"the agent ended with status {await process.wait()}: run {' '.join(command[1:3])}")
        return _Target(str(json.loads(line)["url"]), token, process)

    async def commit(self, url: str, published: Published) -> None:
        try:
            await self._engines.commit(url, published.version)
        except PublishError:
            await self._abandon(url)
            raise
        await self._serves(url, published)

    async def switch(self, url: str, published: Published, mode: PauseMode) -> Mapping[str, str]:
        try:
            held = await self._engines.switch(url, published.version, mode)
        except PublishError:
            await self._abandon(url)
            raise
        await self._serves(url, published)
        return held

    async def _serves(self, url: str, published: Published) -> None:
        """The engine maps the new slot: the other may be written, ahead of the next version."""
        target = self._targets[url]
        assert target.slot is not None, "committed without being staged"
        slot, target.slot = target.slot, None
        _, nbytes = aligned_offsets(t.nbytes for t in published.tensors)
        try:
            await self._agent(target, "/serve", {"slot": slot["slot"]}, "handing over")
            ahead = await self._lend(url, target, published, nbytes)
            body = {"target": url, "endpoint": ahead["endpoint"], "address": ahead["address"], "nbytes": nbytes}
            await self._call(f"{published.address['control']}/lend", str(published.address["token"]), body, "lending")
        except PublishError:
            await self._abandon(url)  # the engine serves the version; the next one finds a new agent, or new memory

    async def discard(self, url: str, published: Published) -> None:
        await self._drop(url)
        await self._engines.discard(url, published.version)

    async def _drop(self, url: str) -> None:
        """Give up the slot that was lent. An agent that does not answer any more is given up itself."""
        target = self._targets.get(url)
        if target is None or target.slot is None:
            return
        slot, target.slot = target.slot, None
        try:
            await self._agent(target, "/drop", {"slot": slot["slot"]}, "giving up memory")
        except PublishError:
            await self._abandon(url)

    async def _abandon(self, url: str) -> None:
        """Forget the agent: which of its slots the engine maps is not known, so that none may be written again."""
        target = self._targets.pop(url, None)
        if target is not None:
            await _end(target)

    async def _agent(self, target: _Target, path: str, body: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        return await self._call(target.url + path, target.token, body, what)

    async def _call(self, url: str, token: str, body: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        try:
            answer = await self._http.call("POST", url, {**body, "token": token}, once=True)
        except EngineUnavailable as error:  # an agent, or the trainer; the engine itself may be well
            raise PublishError(f"{what}: {error}") from None
        except EngineError as error:
            raise PublishError(f"{what}: {error}") from error
        assert isinstance(answer, dict), "our own server answers with objects"
        return answer

    async def close(self) -> None:
        for url in list(self._targets):
            await self._abandon(url)
        await self._engines.close()
        await self._http.close()


async def _end(target: _Target) -> None:
    process = target.process
    if process is None:
        return
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            process.kill()
    await process.wait()


class P2PTransport(WeightTransport[P2PConfig]):
    """NIXL or Mooncake: one buffer in the trainer, however many engines."""

    Config = P2PConfig
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key="engine.use",
            values=("sglang",),
            reason='SGLang\'s server does not map memory that another process registered; use transport = "broadcast"',
        ),
        Conflict(
            key="engine.pipeline_parallel",
            values=(2, 4, 8, 16, 32),
            reason="the layers of an engine are on several ranks, and its agent registers memory for one; use "
            'transport = "broadcast"',
        ),
        Conflict(
            key="engine.colocated",
            values=(True,),
            reason="trainer and engine share a device and its memory: handing over a pointer beats every write; use "
            'transport = "shared_memory"',
        ),
    )

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        found = installed()
        if "" in found.values():
            return Example()
        return Example(unavailable="; ".join(f"{name}: {why}" for name, why in found.items()))

    def sender(self, run_directory: Path) -> P2PSender:
        c = self.config
        return P2PSender(
            library=c.library,
            host=c.host,
            bucket_bytes=c.bucket_mb << 20,
            timeout=c.timeout,
            require_rdma=c.require_rdma,
        )

    def receiver(self, run_directory: Path) -> P2PReceiver:
        return P2PReceiver(self.config)
