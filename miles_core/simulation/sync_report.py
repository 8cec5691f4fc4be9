"""What `miles simulate sync` prints: Markdown tables of seconds and of their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from miles_core.simulation.sync_model import FITTED
from miles_core.simulation.sync_published import leave_one_out, observations

__all__ = ["PublishedRow", "published_rows", "published_table", "scenario_table"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One published number beside the model's."""

    model: str
    transport: str
    published: float
    """Seconds."""
    predicted: float
    """Seconds, with the constants of the product."""
    left_out: float
    """Seconds, with constants fitted to all other models."""
    fitted: bool
    """Whether the constants of the product were fitted to this number."""

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10 % too long."""
        return self.predicted / self.published - 1

    @property
    def left_out_error(self) -> float:
        """Relative."""
        return self.left_out / self.published - 1

    def as_dict(self) -> dict[str, object]:
        """Plain JSON data."""
        return {**dataclasses.asdict(self), "error": self.error, "left_out_error": self.left_out_error}


def published_rows() -> list[PublishedRow]:
    """All fourteen, model by model."""
    left_out = leave_one_out()
    return [
        PublishedRow(
            model=observation.figure.name,
            transport=observation.transport,
            published=observation.seconds,
            predicted=observation.predicted(FITTED),
            left_out=left_out[observation.figure.name][observation.transport],
            fitted=observation.fitted,
        )
        for observation in observations()
    ]


def published_table(rows: Sequence[PublishedRow]) -> str:
    """A row a model, and what was not fitted."""
    head = [
        "model",
        *(f"{t}: {what}" for t in ("broadcast", "p2p") for what in ("published s", "model s", "error", "left out")),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model in dict.fromkeys(row.model for row in rows):
        cells = [model]
        for row in (row for row in rows if row.model == model):
            cells += [f"{row.published:.3f}", f"{row.predicted:.3f}", f"{row.error:+.1%}", f"{row.left_out_error:+.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    missed = ", ".join(f"{row.model} by {row.transport}" for row in rows if not row.fitted)
    told = f"The constants were not fitted to {missed}. Left out: the error with constants fitted to all other models."
    return "\n".join([*lines, "", told])


def scenario_table(points: Sequence[tuple[str, Mapping[str, float], Mapping[str, float]]]) -> str:
    """A row a point and transport: (label, parts of a broadcast, parts of one-sided writes), seconds."""
    parts = list(dict.fromkeys(part for _, *both in points for one in both for part in one))
    head = ["", "transport", "seconds", *parts]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for label, *both in points:
        for transport, one in zip(("broadcast", "p2p"), both, strict=True):
            cells = [f"{one[part]:.3f}" if part in one else "" for part in parts]
            lines.append("| " + " | ".join([label, transport, f"{sum(one.values()):.3f}", *cells]) + " |")
    return "\n".join(lines)
