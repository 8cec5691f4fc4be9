"""Weight transports: move a published policy version from the trainer to the engines.

One transaction for every transport (see the publishing page): prepare, pause, transfer, verify, commit, resume. The
core drives it (`miles_core.sync.transaction`); a transport moves bytes and lets both sides be verified.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.contracts.component import Component, ConfigT

if TYPE_CHECKING:
    from miles_core.contracts.backends import WeightStream

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
    """A version as the sender holds it, ready for receivers: a JSON-able `address` that says where the bytes are."""

    version: int
    tensors: tuple[TensorInfo, ...]
    address: Mapping[str, object]
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class WeightSender(abc.ABC):
    """The trainer's end. Lives in the trainer process (it may import torch)."""

    @abc.abstractmethod
    def send(self, version: int, weights: WeightStream) -> Published:
        """Make the tensors of `weights` available as `version`. The version before stays readable until the next
        call: a failed publish leaves the engines with something to keep."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release buffers and files. Idempotent."""


class WeightReceiver(abc.ABC):
    """The controller's end: makes one engine (by URL) take a version, in two phases."""

    @abc.abstractmethod
    async def stage(self, url: str, published: Published) -> Mapping[str, str]:
        """Get the version to the engine without making it visible; the engine's checksum per tensor. Raises
        `PublishError` when the engine cannot hold it; the engine then still serves the version before."""

    @abc.abstractmethod
    async def commit(self, url: str, published: Published) -> None:
        """Make the staged version the one that the engine serves. Called while it is paused."""

    @abc.abstractmethod
    async def discard(self, url: str, published: Published) -> None:
        """Forget a staged version. Never raises for an engine that staged nothing."""

    async def close(self) -> None:
        """Release connections. Default: nothing."""


class WeightTransport(Component[ConfigT], abc.ABC):
    """A pair of ends. `sender` is called in the trainer process, `receiver` in the controller."""

    @abc.abstractmethod
    def sender(self, run_directory: Path) -> WeightSender: ...

    @abc.abstractmethod
    def receiver(self, run_directory: Path) -> WeightReceiver: ...
