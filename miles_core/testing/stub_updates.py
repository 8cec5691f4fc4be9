"""The stub engine's in-place updates: SGLang's group and session endpoints, over real process groups (needs torch)."""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from miles_core.data.checksums import checksum

if TYPE_CHECKING:
    from miles_core.testing.stub_engine import StubEngine

__all__ = ["StubUpdates"]


class StubUpdates:
    """State of one stub's sessions. A tensor of the checksum map is overwritten as its bytes arrive."""

    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine
        self._groups: dict[str, Any] = {}
        self._open = False
        self.timeout = 5.0
        """Seconds that a member is waited for."""
        self.corrupt = 0
        """So many buckets from now on have a byte flipped after they arrived."""

    def routes(self) -> dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        return {
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._receive,
            "/end_weight_update": self._end,
            "/update_weight_version": self._version,
        }

    async def _join(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            self._groups[body["group_name"]] = await asyncio.to_thread(self._meet, body)
        except RuntimeError as error:
            return _refused(str(error))
        return _done()

    def _meet(self, body: dict[str, Any]) -> Any:
        """As `process_groups.join_group` does, unregistered: a process can have a name once, and the sender of a test,
        and other stubs, live in this one."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        limit = datetime.timedelta(seconds=self.timeout)
        store = TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=limit)
        name = body["group_name"]
        keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        return dist.ProcessGroupGloo(keys, body["rank_offset"], body["world_size"], limit)

    async def _leave(self, request: web.Request) -> web.Response:
        group = self._groups.pop((await request.json())["group_name"], None)
        if group is None:
            return _refused("no such group")
        return _done()

    async def _begin(self, request: web.Request) -> web.Response:
        if self._open:
            return _refused("a weight-update session is already open")
        self._open = True
        return _done()

    async def _receive(self, request: web.Request) -> web.Response:
        import torch

        body = await request.json()
        if not self._open:
            return _refused("no session is open")
        sizes = [
            math.prod(shape) * getattr(torch, dtype).itemsize
            for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
        ]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            group = self._groups[body["group_name"]]
            await asyncio.to_thread(lambda: group.broadcast(data, 0).wait())
        except (KeyError, RuntimeError) as error:
            return _refused(f"broadcast: {error}")
        if self.corrupt:
            self.corrupt -= 1
            data[0] ^= 1
        for name, part in zip(body["names"], torch.split(data, sizes), strict=True):
            self._engine.weights[name] = checksum(part.numpy().tobytes())
        return _done()

    async def _end(self, request: web.Request) -> web.Response:
        if not self._open:
            return _refused("no session is open")
        self._open = False
        return _done()

    async def _version(self, request: web.Request) -> web.Response:
        if not self._engine.weights:
            return _refused("no weights have arrived yet")
        self._engine.version = int((await request.json())["new_version"])
        return _done()


def _done() -> web.Response:
    return web.json_response({"success": True, "message": ""})


def _refused(message: str) -> web.Response:
    body: dict[str, Any] = {"success": False, "message": message}
    return web.json_response(body, status=400)
