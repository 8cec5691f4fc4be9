"""Trajectories in Parquet: one row a trajectory, lists as columns, so that pandas, polars and duckdb open them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from miles_core.data.trajectory import Status, Trajectory, Turn

__all__ = ["read_rollouts", "rollout_table", "trajectories_of", "write_rollouts"]

_TEACHER = {"teacher_logprobs": "float32", "teacher_top_ids": "int32", "teacher_top_logprobs": "float32"}


def write_rollouts(path: Path, trajectories: Iterable[Trajectory], *, step: int, policy_version: int) -> None:
    """Write atomically."""
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(rollout_table(trajectories, step=step, policy_version=policy_version), temporary, compression="zstd")
    temporary.replace(path)


def read_rollouts(path: Path) -> list[Trajectory]:
    """The trajectories of one file, equal to what was written."""
    import pyarrow.parquet as pq

    return trajectories_of(pq.read_table(path))


def trajectories_of(table: Any) -> list[Trajectory]:
    """The trajectories of a pyarrow table that `rollout_table` made."""
    return [_trajectory(row) for row in table.to_pylist()]


def rollout_table(trajectories: Iterable[Trajectory], *, step: int, policy_version: int) -> Any:
    """A pyarrow table, one row a trajectory. `weights` and `conversation` are there when a trajectory of the table has
    them. `routed_experts` is flat int16 (int32 when an id needs it), with its shape."""
    import pyarrow as pa

    rows = list(trajectories)
    columns: dict[str, Any] = {
        "step": pa.array([step] * len(rows), pa.int64()),
        "policy_version": pa.array([policy_version] * len(rows), pa.int64()),
    }
    for name in ("prompt_id", "group_id", "episode_id", "trajectory_id"):
        columns[name] = pa.array([getattr(t, name) for t in rows], pa.string())
    columns["status"] = pa.array([t.status.value for t in rows], pa.string())
    columns["reward"] = pa.array([_scalar(t.reward) for t in rows], pa.float64())
    columns["rewards"] = pa.array([_mapping_json(t.reward) for t in rows], pa.string())
    for name, kind in (
        ("token_ids", pa.int32()),
        ("loss_mask", pa.bool_()),
        ("logprobs", pa.float32()),
        ("versions", pa.int32()),
    ):
        columns[name] = _lists(pa, [getattr(t, name) for t in rows], kind)
    columns |= _teacher_columns(pa, rows)
    if any(t.weights is not None for t in rows):
        weights = [np.ones(len(t), np.float32) if t.weights is None else t.weights for t in rows]
        columns["weights"] = _lists(pa, weights, pa.float32())
    if any(t.conversation is not None for t in rows):
        columns["conversation"] = pa.array([t.conversation for t in rows], pa.string())
    columns["turns"] = pa.array([orjson.dumps(t.turns).decode() for t in rows], pa.string())
    if any(t.routed_experts is not None for t in rows):
        routes = [np.zeros((0, 0, 0), np.int16) if t.routed_experts is None else t.routed_experts for t in rows]
        wide = any(r.size and int(r.max()) > np.iinfo(np.int16).max for r in routes)
        flat = [r.reshape(-1).astype(np.int32 if wide else np.int16) for r in routes]
        columns["routed_experts"] = _lists(pa, flat, pa.int32() if wide else pa.int16())
        columns["routed_experts_shape"] = pa.array([list(r.shape) for r in routes], pa.list_(pa.int32()))
    return pa.table(columns)


def _teacher_columns(pa: Any, rows: list[Trajectory]) -> dict[str, Any]:
    """What a teacher said, where one was asked: the k likeliest tokens lie flat, k numbers a token."""
    found = {}
    for name, kind in _TEACHER.items():
        arrays = [getattr(t, name) for t in rows]
        if any(a is not None for a in arrays):
            found[name] = _lists(pa, [np.zeros(0) if a is None else a.reshape(-1) for a in arrays], getattr(pa, kind)())
    return found


def _teacher_fields(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    fields: dict[str, Any] = {name: np.array(row[name]) for name in _TEACHER if row.get(name)}
    tops = {name: column.reshape(length, -1) for name, column in fields.items() if name.startswith("teacher_top")}
    return {**fields, **tops}


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    routes = row.get("routed_experts")
    shape = row.get("routed_experts_shape")
    return Trajectory(
        token_ids=np.array(row["token_ids"], np.int32),
        loss_mask=np.array(row["loss_mask"], np.bool_),
        logprobs=np.array(row["logprobs"], np.float32),
        versions=np.array(row["versions"], np.int32),
        prompt_id=row["prompt_id"],
        group_id=row["group_id"],
        episode_id=row["episode_id"],
        trajectory_id=row["trajectory_id"],
        turns=tuple(Turn(**turn) for turn in orjson.loads(row["turns"])),
        routed_experts=None if not routes else np.array(routes, np.int32).reshape(shape).astype(np.int32),
        reward=orjson.loads(row["rewards"]) if row["rewards"] else row["reward"],
        status=Status(row["status"]),
        weights=None if row.get("weights") is None else np.array(row["weights"], np.float32),
        conversation=row.get("conversation"),
        **_teacher_fields(row, len(row["token_ids"])),
    )


def _scalar(reward: float | Mapping[str, float] | None) -> float | None:
    return None if reward is None or isinstance(reward, Mapping) else float(reward)


def _mapping_json(reward: float | Mapping[str, float] | None) -> str | None:
    return orjson.dumps(dict(reward)).decode() if isinstance(reward, Mapping) else None


def _lists(pa: Any, arrays: list[Any], kind: Any) -> Any:
    """A list column from arrays, without a Python object a value."""
    offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int32)
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, kind))
