"""The wire record: a digest of what every generation sent and returned, taken where it leaves and enters the process.

It is the audit's independent witness: trajectories are compared with it, not with themselves.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from miles_core.contracts.engines import Generation, TokenIds

__all__ = ["WireEntry", "WireRecord", "digest"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS generations (
    request_id TEXT PRIMARY KEY,
    input_tokens INTEGER NOT NULL, input_digest TEXT NOT NULL,
    output_tokens INTEGER NOT NULL, output_digest TEXT NOT NULL,
    logprobs_digest TEXT NOT NULL, versions_digest TEXT NOT NULL
) WITHOUT ROWID;
"""


def digest(column: NDArray[np.generic]) -> str:
    """xxh3-128 of a column's bytes, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(column).tobytes())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WireEntry:
    """What one generation sent and returned, as lengths and digests."""

    input_tokens: int
    input_digest: str
    output_tokens: int
    output_digest: str
    logprobs_digest: str
    versions_digest: str


class WireRecord:
    """`wire.sqlite` of a run."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        self._pending: list[tuple[str, int, str, int, str, str, str]] = []

    def add(self, input_ids: TokenIds, generation: Generation) -> None:
        """Take a generation down; it is on disk after the next `flush`, which comes before anything trains on it."""
        self._pending.append(
            (
                generation.request_id,
                len(input_ids),
                digest(np.asarray(input_ids, np.int32)),
                len(generation.token_ids),
                digest(generation.token_ids),
                digest(generation.logprobs),
                digest(generation.versions),
            )
        )

    def flush(self) -> None:
        """Write what was taken down, in one transaction. A request that was answered twice is an integrity error: one
        of the answers would be lost."""
        pending, self._pending = self._pending, []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("INSERT INTO generations VALUES (?, ?, ?, ?, ?, ?, ?)", pending)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def find(self, request_id: str) -> WireEntry | None:
        row = self._db.execute("SELECT * FROM generations WHERE request_id = ?", (request_id,)).fetchone()
        if row is None:
            return None
        names = [f.name for f in dataclasses.fields(WireEntry)]
        return WireEntry(**dict(zip(names, row[1:], strict=True)))

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM generations").fetchone()[0])

    def close(self) -> None:
        if self._pending:
            self.flush()
        self._db.close()
