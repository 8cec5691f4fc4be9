"""The `auto` transport: of the installed ones, the quickest that fits the run, measured at start.

What a transport needs and refuses is data (`requires`, `conflicts`), so that `miles check` tells it without measuring.
What is left is measured with `miles sync bench`, in a process of its own, and the choice replaces `auto` in the
resolved config before either end is built. A transport that was slower than `broadcast` is never picked where
`broadcast` can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.transports import WeightReceiver, WeightSender, WeightTransport
from miles_core.errors import PublishError

__all__ = ["AutoConfig", "AutoTransport", "Choice", "Measurement", "choose"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A publish of `nbytes` to `engines` engines on this host, the best of several. `seconds` in all,
    `paused_seconds` of them while engines were paused; `verify_share` is the part of `seconds` that checksums take.
    `failure` says why there is none."""

    transport: str
    nbytes: int = 0
    engines: int = 0
    seconds: float = 0.0
    paused_seconds: float = 0.0
    verify_share: float = 0.0
    failure: str = ""

    @property
    def rate(self) -> float:
        """GB/s, summed over the engines."""
        return self.nbytes * self.engines / self.seconds / 1e9 if self.seconds else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The transport that was picked, and why it and not another."""

    transport: str
    reasons: tuple[str, ...]


def choose(measured: Sequence[Measurement], refused: Mapping[str, str]) -> Choice:
    """The quickest of the measured; `refused` are the others, with the reason. Raises `PublishError` when none is
    left."""
    reasons = [f"{name} is refused: {reason}" for name, reason in sorted(refused.items())]
    reasons += [f"{m.transport} does not work here: {m.failure}" for m in measured if m.failure]
    working = sorted((m for m in measured if not m.failure), key=lambda m: (m.seconds, m.transport != "broadcast"))
    if not working:
        raise PublishError("no transport is left for transport.use = 'auto': " + "; ".join(reasons))
    best, *others = working
    reasons.insert(0, f"{best.transport} took {best.seconds:.3f} s for {best.nbytes / 1e6:.0f} MB to {best.engines}")
    reasons += [f"{m.transport} took {m.seconds:.3f} s" for m in others]
    return Choice(transport=best.transport, reasons=tuple(reasons))


class AutoConfig(ComponentConfig):
    """Measure what is installed, and take the quickest."""

    measure_mb: int = Field(default=32, ge=1)
    """MB of weights that are published to measure."""


class AutoTransport(WeightTransport[AutoConfig]):
    """A name in a config, and no transport: `miles train` puts the choice in its place."""

    Config = AutoConfig
    several_fleets = True  # every other refuses it by itself, and is not picked then

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        return Example(unavailable="it moves nothing by itself: what it picks is checked under its own name")

    def sender(self, run_directory: Path) -> WeightSender:
        raise PublishError(_UNRESOLVED)

    def receiver(self, run_directory: Path) -> WeightReceiver:
        raise PublishError(_UNRESOLVED)


_UNRESOLVED = "transport.use = 'auto' was not resolved: start the run with `miles train`, or name a transport"
