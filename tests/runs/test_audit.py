"""The audit finds nothing in an honest run, and every kind of tampering in a spoiled one."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from miles_core.data.parquet import read_rollouts, write_rollouts
from miles_core.data.trajectory import Trajectory
from miles_core.runs.audit import audit_run
from miles_core.runs.directory import RunDirectory


def audit(path: Path) -> list[str]:
    return list(audit_run(RunDirectory.open(path, write=False)).mismatches)


def test_an_honest_run_has_no_mismatch(finished_run: Path) -> None:
    result = audit_run(RunDirectory.open(finished_run, write=False))
    assert result.hard_mismatches == 0
    assert result.trajectories == 4 * 64
    assert result.trained_tokens > 0
    assert result.conservation.trained == 4 * 8
    assert result.divergence["largest fidelity/abs_difference_max"] < 1e-4
    assert "hard mismatches: 0" in result.text


def _token(t: Trajectory) -> Trajectory:
    ids = t.token_ids.copy()
    ids[t.turns[0].start] = (ids[t.turns[0].start] + 1) % 300
    return dataclasses.replace(t, token_ids=ids)


def _prompt(t: Trajectory) -> Trajectory:
    ids = t.token_ids.copy()
    ids[0] += 1
    return dataclasses.replace(t, token_ids=ids)


def _logprob(t: Trajectory) -> Trajectory:
    logprobs = t.logprobs.copy()
    logprobs[-1] -= 0.5
    return dataclasses.replace(t, logprobs=logprobs)


def _version(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, versions=np.where(t.versions >= 0, 9, -1))


def _twin(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, turns=(*t.turns, t.turns[0]))


def _unsampled(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, turns=())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_token, "not what the engine returned"),
        (_prompt, "not what the engine was sent"),
        (_logprob, "not what the engine returned"),
        (_version, "later than the trainer's"),
        (_twin, "its turns cover"),
        (_unsampled, "its turns cover 0"),
    ],
)
def test_one_changed_trajectory_is_found(
    run_copy: Path, spoil: Callable[[Trajectory], Trajectory], message: str
) -> None:
    path = RunDirectory(run_copy).rollout_file(2)
    trajectories = read_rollouts(path)
    trajectories[5] = spoil(trajectories[5])
    write_rollouts(path, trajectories, step=2, policy_version=1)
    found = audit(run_copy)
    assert any(message in m and trajectories[5].trajectory_id in m for m in found), found


def test_a_trajectory_trained_twice_is_found(run_copy: Path) -> None:
    path = RunDirectory(run_copy).rollout_file(2)
    trajectories = read_rollouts(path)
    write_rollouts(path, [*trajectories, trajectories[0]], step=2, policy_version=1)
    assert any("was trained twice" in m for m in audit(run_copy))


def test_a_missing_group_and_a_missing_wire_entry_are_found(run_copy: Path) -> None:
    path = RunDirectory(run_copy).rollout_file(3)
    trajectories = read_rollouts(path)
    gone = trajectories[0].group_id
    write_rollouts(path, [t for t in trajectories if t.group_id != gone], step=3, policy_version=2)
    assert f"group {gone} is trained in the ledger and in no rollout file" in audit(run_copy)
    with closing(sqlite3.connect(run_copy / "wire.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM generations")
    assert any("is not in the wire record" in m for m in audit(run_copy))


def test_a_lost_group_is_found(run_copy: Path) -> None:
    with closing(sqlite3.connect(run_copy / "ledger.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM groups WHERE position = 3")
    assert "the ledger's conservation law does not hold" in audit(run_copy)
