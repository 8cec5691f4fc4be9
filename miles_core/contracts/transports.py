"""Weight transports: move a published policy version from the trainer to the engines.

One transaction for every transport (see the publishing page). The core drives it (`miles_core.sync.transaction`) and
compares the checksums; a transport moves bytes. Calls of one publish, in order:

| | where | staged transport | in-place transport (`in_place = True`) |
|---|---|---|---|
| `sender.send` | trainer | bytes where receivers find them | names, shapes, checksums |
| `receiver.stage` | each engine | the bytes, beside those in use | whatever can be done before the pause |
| *pause* | | | |
| `receiver.connect` | once | – | a session of exactly these engines |
| `sender.transfer`, `receiver.receive` | both ends at once | – | the bytes, over those in use |
| *verify* | each engine | | what it holds now |
| `receiver.commit` | each engine | the staged version becomes the one in use | the engine reports the version |
| *verify* | each engine | what it holds now | |
| *flush, resume* | | | |

A staged receiver with `atomic = True` saves the engines everything from *pause* on: its `switch` commits between two
steps of the engine, and answers with checksums of what the engine serves then. (`abort` still pauses: what is aborted
must be told apart from what the engine aborts by itself.)

Where a call fails, the engines keep the version before (staged), or those that may hold something else are drained:
nothing is routed to them until a later publish has brought them a verified version.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from miles_core.contracts.component import Component, ConfigT

if TYPE_CHECKING:
    from miles_core.contracts.backends import WeightStream
    from miles_core.contracts.engines import PauseMode

__all__ = ["Published", "TensorInfo", "WeightReceiver", "WeightSender", "WeightTransport"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor of a version: checkpoint name, dtype name (`float32`, `bfloat16`, …), shape, xxh3-128 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version as the sender holds it, ready for receivers: a JSON-able `address` that says where the bytes are.

    `expected` is what the engines' `/weights_checker` must answer, when that is not one checksum a tensor of the plan:
    the engine's `WeightWitness` computed it from the trainer's tensors, whatever the transport.
    """

    version: int
    tensors: tuple[TensorInfo, ...]
    address: Mapping[str, object]
    seconds: float
    expected: Mapping[str, str] | None = None

    @property
    def checksums(self) -> dict[str, str]:
        """What every engine must hold, by the names that engines report."""
        if self.expected is not None:
            return dict(self.expected)
        return {tensor.name: tensor.checksum for tensor in self.tensors}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class WeightSender(abc.ABC):
    """The trainer's end. Lives in the trainer process (it may import torch)."""

    @abc.abstractmethod
    def send(self, version: int, weights: WeightStream) -> Published:
        """Make the tensors of `weights` available as `version`. The version before stays readable until the next
        call: a failed publish leaves the engines with something to keep. An in-place transport only goes through the
        stream, for names, shapes and checksums, and gets it again in `transfer`."""

    def transfer(self, published: Published, weights: WeightStream, session: Mapping[str, object]) -> None:
        """In-place transports: move the bytes into engines that are receiving, while they are paused. `weights` is the
        stream of `send` once more, bit for bit; `session` is what `WeightReceiver.connect` answered. May be called
        again for the same version, with another session, after a failure. Raises `PublishError`; what the engines hold
        is unknown then."""
        raise AssertionError(f"{type(self).__name__} is of a staged transport: it has nothing to transfer")

    @abc.abstractmethod
    def close(self) -> None:
        """Release buffers and files. Idempotent."""


class WeightReceiver(abc.ABC):
    """The controller's end: makes engines (by URL) take a version.

    An engine that is gone is an `EngineUnavailable` somewhere in the chain of causes: it is drained, and the others go
    on. Everything else stops the publish.
    """

    in_place: ClassVar[bool] = False
    """Bytes are written over those in use, while the engine is paused: there is no version before to fall back to."""

    atomic: ClassVar[bool] = False
    """The engine can commit a staged version between two of its steps: there is `switch`."""

    @abc.abstractmethod
    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        """Get the version to the engine without making it visible; the engine's checksum per tensor of the plan.
        In-place transports do here what can be done before the pause (compare plan and engine, fetch and verify files
        beside it); what they answer is not looked at. Raises `PublishError` when the engine cannot hold it; the engine
        then still serves the version before."""

    async def connect(self, urls: Sequence[str], published: Published) -> Mapping[str, object]:
        """In-place transports: open a session in which the sender writes to exactly these engines; JSON-able, for both
        ends. Engines are paused. An engine that refuses is left out, so that nobody waits for it: its `receive` raises.
        A session that was open before and had other engines is of no use any more."""
        raise AssertionError(f"{type(self).__name__} is of a staged transport: it has no session")

    async def receive(self, url: str, published: Published, session: Mapping[str, object]) -> None:
        """In-place transports: make the engine take the bytes; runs beside `sender.transfer`. Raises `PublishError`;
        what the engine holds is unknown then."""
        raise AssertionError(f"{type(self).__name__} is of a staged transport: it receives nothing")

    @abc.abstractmethod
    async def commit(self, url: str, published: Published) -> None:
        """Make the staged version the one that the engine serves, or, in place, make the engine report the version that
        it was found to hold. Called while it is paused."""

    async def switch(self, url: str, published: Published, mode: PauseMode) -> Mapping[str, str]:
        """Atomic receivers: make the staged version the one that the engine serves from its next step on. Requests in
        flight are retracted or go on with their cache, as `mode` says; no prefix that was cached under other weights is
        found by a new request. Returns the checksums of what it serves now. An error leaves it on the version before,
        or says that it may not have."""
        raise AssertionError(f"{type(self).__name__} is not atomic: it commits while the engine is paused")

    @abc.abstractmethod
    async def discard(self, url: str, published: Published) -> None:
        """Forget what `stage`, `connect` and `receive` left at the engine. Never raises for an engine that holds
        nothing of it."""

    async def close(self) -> None:
        """Release connections. Default: nothing."""


class WeightTransport(Component[ConfigT], abc.ABC):
    """A pair of ends. `sender` is called in the trainer process (rank 0), `receiver` in the controller."""

    several_fleets: ClassVar[bool] = False
    """Whether a version that was sent can be brought to engines of another fleet too, by a receiver of their own, as
    long as it is the last one or the one before: dedicated evaluation asks for it."""

    @abc.abstractmethod
    def sender(self, run_directory: Path) -> WeightSender: ...

    @abc.abstractmethod
    def receiver(self, run_directory: Path) -> WeightReceiver: ...
