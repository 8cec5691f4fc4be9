"""Whole runs of the tiny example by the schedules that keep, weigh or redo what is old: what trained is what was
sampled, within its bound, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.data.parquet import read_rollouts
from miles_core.data.trajectory import Trajectory
from miles_core.rollout.ledger import Ledger
from miles_core.runs.audit import audit_run
from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore
from tests.runs.conftest import train

pytest.importorskip("torch")
STEPS = 4
SMALL = (f"run.steps={STEPS}", "schedule.batch_groups=4", "schedule.group_size=4", "evaluation.datasets=[]")


def trained(path: Path) -> list[tuple[int, Trajectory]]:
    """(policy version of the batch, trajectory) of everything that trained; the audit is clean."""
    run = RunDirectory.open(path, write=False)
    result = audit_run(run)
    assert result.hard_mismatches == 0, result.text
    ledger = Ledger(run.ledger_file)
    try:
        assert ledger.check().trained == 4 * STEPS
    finally:
        ledger.close()
    return [(step, t) for step in range(STEPS) for t in read_rollouts(run.rollout_file(step + 1))]


def metric(path: Path, kind: str, name: str) -> list[float]:
    store = MetricsStore(path / "metrics.sqlite")
    try:
        return [value for _, value in store.series(kind, name)]
    finally:
        store.close()


def test_partial_episodes_go_on_in_the_next_step(tmp_path: Path) -> None:
    path = train(
        tmp_path,
        "partial",
        *SMALL,
        "schedule.over_sample=4",
        "schedule.partial=true",
        "schedule.max_staleness=4",
        "sampling.max_new_tokens=24",
        "engine.max_running=12",
    )
    rollouts = trained(path)
    versions = [set(t.versions[t.loss_mask].tolist()) for _, t in rollouts]
    assert any(len(found) > 1 for found in versions), "some trajectory was sampled by two versions"
    assert any("+" in turn.request_id for _, t in rollouts for turn in t.turns)
    assert all(t.status != "aborted" for _, t in rollouts)
    assert not metric(path, "schedule", "returned/surplus")


@pytest.mark.parametrize("stale", ["reweight", "resample"])
def test_no_token_over_the_bound_trains(tmp_path: Path, stale: str) -> None:
    path = train(
        tmp_path,
        stale,
        *SMALL,
        "schedule.mode=async",
        f"schedule.stale={stale}",
        "schedule.max_staleness=1",
        "schedule.capacity=4",
        "schedule.retries=8",
        "schedule.max_running=64",
        "schedule.pause=abort",
        "schedule.partial=true",
        "sampling.max_new_tokens=12",
    )
    for step, trajectory in trained(path):
        ages = step - trajectory.versions[trajectory.loss_mask]
        assert (ages >= 0).all()
        assert (ages <= 1).all()
    assert max(metric(path, "rollout", "staleness/max")) <= 1
    assert len(metric(path, "schedule", "trainer_idle_seconds")) == STEPS
