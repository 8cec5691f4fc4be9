"""Metrics and timeline of a run, in one SQLite file that any tool can open."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.events import EvaluationRecord
from miles_core.contracts.trackers import Tracker

__all__ = ["MetricsStore", "SqliteTracker"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS metrics (
    kind TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (kind, step, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spans (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    lane TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, start REAL NOT NULL, stop REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS evaluations (
    version INTEGER NOT NULL, dataset TEXT NOT NULL, mode TEXT NOT NULL,
    placement TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (version, dataset, mode)
) WITHOUT ROWID;
"""


class MetricsStore:
    """Numbers by (kind, step, name); logging one again replaces it. Spans are phases, in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Raises `ValueError` for a number that is not finite: it would be drawn as a gap and read as a zero."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {kind}/{name} at step {step} is {value}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(
                "INSERT OR REPLACE INTO metrics (kind, step, name, value) VALUES (?, ?, ?, ?)",
                [(kind, step, name, float(value)) for name, value in metrics.items()],
            )
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def span(self, lane: str, name: str, step: int, start: float, stop: float) -> None:
        self._db.execute(
            "INSERT INTO spans (lane, name, step, start, stop) VALUES (?, ?, ?, ?, ?)",
            (lane, name, step, start, stop),
        )

    def rewind(self, step: int) -> None:
        """Forget what was logged for steps after `step` steps had been taken: they are taken again. Spans stay, they
        happened."""
        self._db.execute("DELETE FROM metrics WHERE step > ?", (step,))
        self._db.execute("DELETE FROM evaluations WHERE version > ?", (step,))
        self._db.execute(
            "UPDATE evaluations SET outcome = 'refused', reason = 'the run ended while it was measured' "
            "WHERE outcome = 'running'"
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        """Note what became of an evaluation; a later record of the same version and data set replaces it."""
        self._db.execute(
            "INSERT OR REPLACE INTO evaluations (version, dataset, mode, placement, outcome, reason) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (record.version, record.dataset, record.mode, record.placement, record.outcome, record.reason),
        )

    def evaluations(self) -> list[EvaluationRecord]:
        """All of them, by version and data set."""
        rows = self._db.execute(
            "SELECT version, dataset, mode, placement, outcome, reason FROM evaluations ORDER BY version, dataset, mode"
        )
        names = [field.name for field in dataclasses.fields(EvaluationRecord)]
        return [EvaluationRecord(**dict(zip(names, row, strict=True))) for row in rows]

    def series(self, kind: str, name: str) -> list[tuple[int, float]]:
        rows = self._db.execute(
            "SELECT step, value FROM metrics WHERE kind = ? AND name = ? ORDER BY step", (kind, name)
        )
        return [(int(step), float(value)) for step, value in rows]

    def names(self, kind: str) -> list[str]:
        rows = self._db.execute("SELECT DISTINCT name FROM metrics WHERE kind = ? ORDER BY name", (kind,))
        return [name for (name,) in rows]

    def rows(self) -> list[tuple[str, int, str, float]]:
        """Everything, ordered by kind, step and name."""
        return self._db.execute("SELECT kind, step, name, value FROM metrics ORDER BY kind, step, name").fetchall()

    def spans(self) -> list[tuple[str, str, int, float, float]]:
        """(lane, name, step, start, stop), in the order they were recorded."""
        return self._db.execute("SELECT lane, name, step, start, stop FROM spans ORDER BY seq").fetchall()

    def close(self) -> None:
        self._db.close()


class SqliteTracker(Tracker[ComponentConfig]):
    """The default tracker: `metrics.sqlite` in the run directory."""

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Its numbers can be read back."""
        return Example(inputs=(_read,))

    def __init__(self, config: ComponentConfig) -> None:
        super().__init__(config)
        self._store: MetricsStore | None = None

    def open(self, run_directory: Path, resolved_config: Mapping[str, object]) -> None:
        self._store = MetricsStore(run_directory / "metrics.sqlite")

    def log(self, step: int, metrics: Mapping[str, float], *, kind: str) -> None:
        assert self._store is not None, "log before open"
        self._store.log(kind, step, metrics)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def _read(run_directory: Path) -> list[tuple[str, int, str, float]]:
    store = MetricsStore(run_directory / "metrics.sqlite")
    try:
        return store.rows()
    finally:
        store.close()
