"""The ledger: one state a group, append-only, and the conservation law `issued = trained + dropped + open`.

SQLite in WAL mode, one row a transition. Kill −9 between any two commits leaves a ledger that a resumed run
continues. A group is `trained` once in the history of the weights that exist: rewinding to a checkpoint appends
transitions back to `pending` for the groups whose training was lost with the weights.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal, NoReturn, get_args

from miles_core.errors import LedgerError

__all__ = ["Conservation", "Entry", "Ledger", "State"]

State = Literal["pending", "running", "finished", "batched", "trained", "dropped"]

_ALLOWED: dict[State | None, tuple[State, ...]] = {
    None: ("pending",),
    "pending": ("running", "dropped"),
    "running": ("finished", "pending", "dropped"),
    "finished": ("batched", "pending", "dropped"),
    "batched": ("trained", "pending", "dropped"),
    "trained": (),
    "dropped": (),
}
"""Legal transitions. `trained` and `dropped` are left only by a rewind to an earlier checkpoint."""

_SOURCES = {target: [s for s, targets in _ALLOWED.items() if s and target in targets] for target in get_args(State)}
_MOVE: dict[State, str] = {
    target: "UPDATE groups SET state = ?, step = ?, version = ?, reason = ?, attempt = attempt + ? "
    f"WHERE group_id = ? AND state IN ({', '.join(map(repr, sources))})"
    for target, sources in _SOURCES.items()
}
"""The statement that moves a group to a state, from where that is legal."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS transitions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id TEXT NOT NULL,
    state TEXT NOT NULL,
    step INTEGER,
    version INTEGER,
    reason TEXT NOT NULL DEFAULT '',
    at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    prompt_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    step INTEGER,
    version INTEGER,
    reason TEXT NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX IF NOT EXISTS groups_by_position ON groups (position);
"""
_WRITTEN_DOWN = "".join(
    f"""
CREATE TRIGGER IF NOT EXISTS groups_{event.split()[0].lower()} AFTER {event} ON groups BEGIN
    INSERT INTO transitions (group_id, state, step, version, reason, at) VALUES
        (NEW.group_id, NEW.state, NEW.step, NEW.version, NEW.reason, (julianday('now') - 2440587.5) * 86400.0);
END;"""
    for event in ("INSERT", "UPDATE")
) + "".join(
    f"""
CREATE TRIGGER IF NOT EXISTS transitions_refuse_{event.lower()} BEFORE {event} ON transitions BEGIN
    SELECT RAISE(ABORT, 'transitions are only appended');
END;"""
    for event in ("UPDATE", "DELETE")
)
"""SQLite itself sees to it that no state changes without a row of `transitions`, and that those stay. `at` is Unix time
in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The current state of one group. `position` is its place in the issue order; `attempt` counts retries."""

    group_id: str
    position: int
    prompt_id: str
    attempt: int
    state: State
    step: int | None
    version: int | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conservation:
    """The counts of the law: every issued group is trained, dropped or open."""

    issued: int
    trained: int
    dropped: int
    open: int

    @property
    def holds(self) -> bool:
        return self.issued == self.trained + self.dropped + self.open


class Ledger:
    """The states of all groups of a run. Use from one thread; each method is one transaction."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._depth = 0
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA + _WRITTEN_DOWN)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One commit for everything inside, so that the conservation law holds at it. What raises undoes all of it, and
        has to leave the outermost block."""
        if self._depth == 0:
            self._db.execute("BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield
        except BaseException:
            self._depth -= 1
            if self._depth == 0:
                self._db.execute("ROLLBACK")
            raise
        self._depth -= 1
        if self._depth == 0:
            self._db.execute("COMMIT")

    def issue(self, group_id: str, *, position: int, prompt_id: str) -> None:
        """A new group, `pending`. Raises `LedgerError` when the group or the position was issued before."""
        try:
            self._db.execute(
                "INSERT INTO groups (group_id, position, prompt_id, attempt, state) VALUES (?, ?, ?, 0, 'pending')",
                (group_id, position, prompt_id),
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"group {group_id!r} at position {position} was issued before: {error}") from error

    def move(
        self,
        group_ids: Iterable[str],
        state: State,
        *,
        step: int | None = None,
        version: int | None = None,
        reason: str = "",
    ) -> None:
        """Move groups to a state, all or none. Raises `LedgerError` for an illegal transition. `pending` from a later
        state is a retry, and counted in `attempt`."""
        retry = 1 if state == "pending" else 0
        moved = list(group_ids)
        with self.transaction() if len(moved) > 1 else nullcontext():  # one statement is a transaction by itself
            for group_id in moved:
                if not self._db.execute(_MOVE[state], (state, step, version, reason, retry, group_id)).rowcount:
                    self._refuse(group_id, state)

    def _refuse(self, group_id: str, state: State) -> NoReturn:
        row = self._db.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        if row is None:
            raise LedgerError(f"group {group_id!r} was never issued, it cannot become {state}")
        raise LedgerError(
            f"group {group_id!r} is {row[0]} and cannot become {state}; "
            f"allowed: {', '.join(_ALLOWED[row[0]]) or 'nothing'}"
        )

    def rewind(self, step: int) -> list[Entry]:
        """Return to the moment when `step` steps were taken (a checkpoint): what was trained or dropped in a later
        step, and what was open, is `pending` again with its attempt count kept at 0, so that it is replayed as it was.

        Returns the open groups in issue order.
        """
        with self.transaction():
            lost = self._db.execute(
                "SELECT group_id FROM groups WHERE state NOT IN ('trained', 'dropped') OR step >= ? ORDER BY position",
                (step,),
            ).fetchall()
            for (group_id,) in lost:
                self._db.execute(
                    "UPDATE groups SET state = 'pending', attempt = 0, step = NULL, version = NULL, reason = ? "
                    "WHERE group_id = ?",
                    (f"rewind to step {step}", group_id),
                )
        return self.open()

    def open(self) -> list[Entry]:
        """Groups that are neither trained nor dropped, in issue order."""
        return self._select("WHERE state NOT IN ('trained', 'dropped')")

    def entries(self) -> list[Entry]:
        """All groups in issue order."""
        return self._select("")

    def next_position(self) -> int:
        """The first position of the issue order that has not been issued."""
        row = self._db.execute("SELECT MAX(position) FROM groups").fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def conservation(self) -> Conservation:
        counts = dict(self._db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        issued = self._db.execute(
            "SELECT COUNT(DISTINCT group_id) FROM transitions WHERE state = 'pending'"
        ).fetchone()[0]
        opened = sum(counts.get(state, 0) for state in get_args(State) if state not in ("trained", "dropped"))
        return Conservation(
            issued=issued, trained=counts.get("trained", 0), dropped=counts.get("dropped", 0), open=opened
        )

    def check(self) -> Conservation:
        """The conservation law. Raises `LedgerError` when it does not hold."""
        counts = self.conservation()
        if not counts.holds:
            raise LedgerError(
                f"the ledger lost count: issued {counts.issued} ≠ trained {counts.trained} + dropped {counts.dropped} "
                f"+ open {counts.open}; keep the file ledger.sqlite and report this"
            )
        return counts

    def drops(self) -> dict[str, int]:
        """Dropped groups by reason."""
        rows = self._db.execute("SELECT reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY reason")
        return dict(rows.fetchall())

    def _select(self, where: str) -> list[Entry]:
        rows = self._db.execute(
            "SELECT group_id, position, prompt_id, attempt, state, step, version, reason FROM groups "
            f"{where} ORDER BY position"
        )
        names = [f.name for f in dataclasses.fields(Entry)]
        return [Entry(**dict(zip(names, row, strict=True))) for row in rows]
