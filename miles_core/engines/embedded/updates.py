"""Weights that arrive in place, in SGLang's protocol: join a process group, open a session, receive buckets, close it.

A session writes over the weights in use, so the engine must be paused for its length; who opens one while another is
open is refused. What the engine holds after a session that broke off is not known; the publisher verifies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from miles_core.process_groups import broadcast, join_group, leave_group

from .landing import Landing
from .protocol import BadRequestError
from .weights import WrongStateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from torch.distributed import ProcessGroup

    from .engine import Engine
    from .weights import WeightStore

    Update = Callable[[Mapping[str, Any]], Awaitable[str]]

_JOIN_TIMEOUT = 300.0
"""Seconds to wait for the other members, and for each bucket."""


class WeightUpdates:
    """One engine's sessions and groups. ``calls`` are its endpoints: a body to a message."""

    def __init__(self, engine: Engine, weights: WeightStore) -> None:
        self._engine = engine
        self._weights = weights
        self._landing = Landing(weights)
        self._groups: dict[str, ProcessGroup] = {}
        self._open = False
        self._written = False
        self._lock = asyncio.Lock()
        self.calls: dict[str, Update] = {
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/begin_weight_update": self.begin,
            "/update_weights_from_distributed": self.receive,
            "/end_weight_update": self.end,
            "/update_weight_version": self.take_version,
        }

    async def join(self, body: Mapping[str, Any]) -> str:
        """Meet the sender and the other engines at its store."""
        name = _text(body, "group_name")
        if name in self._groups:
            raise WrongStateError(f"the engine is in the group {name!r} already")
        async with self._lock:
            self._groups[name] = await _collective(
                join_group,
                name,
                host=_text(body, "master_address"),
                port=_number(body, "master_port"),
                rank=_number(body, "rank_offset"),
                size=_number(body, "world_size"),
                backend=_text(body, "backend"),
                timeout=_JOIN_TIMEOUT,
            )
        return f"joined {name}"

    async def leave(self, body: Mapping[str, Any]) -> str:
        """Leave a group."""
        name = _text(body, "group_name")
        async with self._lock:
            group = self._groups.pop(name, None)
            if group is None:
                raise BadRequestError(f"group_name: the engine is in no group {name!r}")
            await _collective(leave_group, group)
        return f"left {name}"

    async def begin(self, _: Mapping[str, Any]) -> str:
        """Open a session."""
        if self._open:
            raise WrongStateError("a weight-update session is open already; call end_weight_update first")
        if self._engine.pause_mode is None:
            raise WrongStateError("generation must be paused first (POST /pause_generation)")
        self._open = True
        return "the session is open"

    async def receive(self, body: Mapping[str, Any]) -> str:
        """Take one bucket: one broadcast of the bytes of its tensors, one after another."""
        if not self._open:
            raise WrongStateError("update_weights_from_distributed must stand between begin and end_weight_update")
        group = self._groups.get(_text(body, "group_name"))
        if group is None:
            raise BadRequestError(f"group_name: the engine is in no group {body['group_name']!r}")
        if body.get("load_format") != "flattened_bucket":
            raise BadRequestError(f"load_format: flattened_bucket, not {body.get('load_format')!r}")
        described = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
        for name, dtype, shape in described:
            self._weights.check(name, dtype, shape)
        async with self._lock:
            place = self._landing.prepare(described)
            await _collective(broadcast, group, place.data)
        await asyncio.wrap_future(self._engine.call(lambda: self._engine.write(place.tensors, adopt=place.adopt)))
        self._written = True
        return f"wrote {len(place.tensors)} tensors"

    async def end(self, _: Mapping[str, Any]) -> str:
        """Close the session."""
        if not self._open:
            raise WrongStateError("no weight-update session is open")
        self._open = False
        self._landing.tidy()
        return "the session is closed"

    async def take_version(self, body: Mapping[str, Any]) -> str:
        """Report this version from now on."""
        if self._open:
            raise WrongStateError("update_weight_version: a weight-update session is open")
        if self._engine.version is None and not self._written:
            raise WrongStateError("update_weight_version: no weights have arrived yet")
        version = _text(body, "new_version")
        await asyncio.wrap_future(self._engine.call(lambda: self._engine.take_version(version)))
        return f"version {version}"


async def _collective(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a call of ``torch.distributed`` beside the event loop; its failure is the caller's to see (HTTP 409)."""
    try:
        return await asyncio.to_thread(call, *arguments, **named)
    except (RuntimeError, ValueError) as error:
        raise WrongStateError(f"{call.__name__}: {error}") from error


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{field}: a string is required, not {value!r}")
    return value


def _number(body: Mapping[str, Any], field: str) -> int:
    value = body.get(field)
    if type(value) is not int:
        raise BadRequestError(f"{field}: an integer is required, not {value!r}")
    return value
