"""The ledger: legal transitions, the conservation law, rewinding."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_core.errors import LedgerError
from miles_core.rollout.ledger import Ledger

STATES = ["pending", "running", "finished", "batched", "trained", "dropped"]
LEGAL = {
    "pending": {"running", "dropped"},
    "running": {"finished", "pending", "dropped"},
    "finished": {"batched", "pending", "dropped"},
    "batched": {"trained", "pending", "dropped"},
    "trained": set(),
    "dropped": set(),
}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def _bring(ledger: Ledger, group: str, *states: str, step: int = 0) -> None:
    for state in states:
        ledger.move([group], state, step=step)  # type: ignore[arg-type]


def test_a_group_cannot_be_issued_twice(ledger: Ledger) -> None:
    ledger.issue("g0", position=0, prompt_id="p")
    with pytest.raises(LedgerError, match="issued before"):
        ledger.issue("g0", position=1, prompt_id="p")
    with pytest.raises(LedgerError, match="issued before"):
        ledger.issue("g1", position=0, prompt_id="p")


def test_every_change_is_written_down_and_stays(tmp_path: Path) -> None:
    begin = time.time()
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.issue("g0", position=0, prompt_id="p")
        _bring(ledger, "g0", "running", "finished", step=3)
        ledger.rewind(2)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        rows = db.execute("SELECT state, step, reason, at FROM transitions ORDER BY seq").fetchall()
        states = [("pending", None, ""), ("running", 3, ""), ("finished", 3, ""), ("pending", None, "rewind to step 2")]
        assert [row[:3] for row in rows] == states
        assert all(begin - 1 < row[3] < time.time() + 1 for row in rows)
        for statement in ("DELETE FROM transitions", "UPDATE transitions SET state = 'trained'"):
            with pytest.raises(sqlite3.IntegrityError, match="only appended"):
                db.execute(statement)


@pytest.mark.parametrize("target", STATES)
@pytest.mark.parametrize("source", STATES)
def test_only_legal_transitions(ledger: Ledger, source: str, target: str) -> None:
    paths = {
        "pending": (),
        "running": ("running",),
        "finished": ("running", "finished"),
        "batched": ("running", "finished", "batched"),
        "trained": ("running", "finished", "batched", "trained"),
        "dropped": ("dropped",),
    }
    ledger.issue("g", position=0, prompt_id="p")
    _bring(ledger, "g", *paths[source])
    if target in LEGAL[source]:
        _bring(ledger, "g", target)
        assert ledger.entries()[0].state == target
    else:
        with pytest.raises(LedgerError, match=f"is {source} and cannot become {target}"):
            _bring(ledger, "g", target)
        assert ledger.entries()[0].state == source


def test_moving_several_is_all_or_nothing(ledger: Ledger) -> None:
    ledger.issue("a", position=0, prompt_id="p")
    ledger.issue("b", position=1, prompt_id="q")
    _bring(ledger, "a", "running")
    with pytest.raises(LedgerError):
        ledger.move(["a", "b"], "finished")
    assert [e.state for e in ledger.entries()] == ["running", "pending"]


def test_a_retry_is_counted(ledger: Ledger) -> None:
    ledger.issue("g", position=0, prompt_id="p")
    _bring(ledger, "g", "running", "pending", "running", "pending")
    assert ledger.entries()[0].attempt == 2


def test_a_lost_group_breaks_the_law(ledger: Ledger, tmp_path: Path) -> None:
    ledger.issue("g", position=0, prompt_id="p")
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as other:
        other.execute("DELETE FROM groups")
    with pytest.raises(LedgerError, match="lost count: issued 1 ≠ trained 0"):
        ledger.check()


class Conservation(RuleBasedStateMachine):
    """Random lives of groups against a dictionary: the law holds after every commit, and a rewind brings back exactly
    what the weights forgot."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Path(":memory:"))
        self.model: dict[str, tuple[str, int | None]] = {}
        self.step = 0

    @rule()
    def issue(self) -> None:
        position = self.ledger.next_position()
        assert position == len(self.model)
        self.ledger.issue(f"g{position}", position=position, prompt_id=f"p{position}")
        self.model[f"g{position}"] = ("pending", None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.model)))
        target = data.draw(st.sampled_from(STATES))
        source, _ = self.model[group]
        if target in LEGAL[source]:
            self.ledger.move([group], target, step=self.step)  # type: ignore[arg-type]
            self.model[group] = (target, self.step)
        else:
            with pytest.raises(LedgerError):
                self.ledger.move([group], target, step=self.step)  # type: ignore[arg-type]

    @rule()
    def next_step(self) -> None:
        self.step += 1

    @precondition(lambda self: self.step > 0)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        self.step = data.draw(st.integers(0, self.step))
        for group, (state, step) in self.model.items():
            if state not in ("trained", "dropped") or (step is not None and step >= self.step):
                self.model[group] = ("pending", None)
        reopened = self.ledger.rewind(self.step)
        assert {e.group_id for e in reopened} == {g for g, (s, _) in self.model.items() if s == "pending"}
        assert all(e.attempt == 0 for e in reopened), "what is replayed is replayed as it was"

    @invariant()
    def law(self) -> None:
        counts = self.ledger.check()
        assert counts.issued == len(self.model)
        assert counts.trained == sum(s == "trained" for s, _ in self.model.values())
        assert {e.group_id: e.state for e in self.ledger.entries()} == {g: s for g, (s, _) in self.model.items()}


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
