"""The page of what nightly runs found of model families; `nox -s nightly` names it, `docs/nightly/families.md`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from miles_core.tito.verify import Verdict

__all__ = ["Row", "record"]

_HEAD = """# Families

What the nightly run found on generated conversations: the laws of `miles families verify`, over a small byte-level
vocabulary in which the tags are tokens. *Read* counts the replies that were parsed, those broken off and mixed up on
purpose among them, *calls* and *malformed* what was found in them. *Compared* are the conversations on which the
official template, as the trl wheel carries it, is append-only and could be compared with. *Broken* must be 0.

| family | way | conversations | refused | read | calls | malformed | compared | broken | CPU seconds |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table, as text."""

    cells: tuple[str, ...]

    @classmethod
    def of(cls, family: str, way: str, verdict: Verdict, seconds: float) -> Row:
        counts = (
            verdict.conversations,
            verdict.refused,
            verdict.replies,
            verdict.calls,
            verdict.malformed,
            verdict.compared,
            sum(verdict.broken.values()),
        )
        return cls((family, way, *(f"{count:,}" for count in counts), f"{seconds:.0f}"))

    @property
    def key(self) -> tuple[str, str]:
        return self.cells[0], self.cells[1]


def record(row: Row) -> None:
    """Put a row into the page, in the place of the one that an earlier night left there. Without
    `MILES_FAMILIES_TABLE` there is no page."""
    named = os.environ.get("MILES_FAMILIES_TABLE")
    if not named:
        return
    page = Path(named)
    lines = page.read_text().splitlines() if page.exists() else []
    table = [line for line in lines if line.startswith("| ")][1:]
    rows = [Row(tuple(cell.strip() for cell in line[2:-2].split(" | "))) for line in table]
    rows = sorted([*(old for old in rows if old.key != row.key), row], key=lambda row: row.key)
    page.write_text(_HEAD + "".join(f"| {' | '.join(row.cells)} |\n" for row in rows))
