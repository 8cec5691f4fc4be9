"""What event hooks receive: small frozen records, safe to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CheckpointSaved", "EvaluationPoint", "EvaluationRecord", "RunInfo", "VersionPublished"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """A run: its id, directory, resolved config (plain JSON data), and whether it continues an earlier process."""

    run_id: str
    directory: Path
    config: Mapping[str, object]
    resumed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VersionPublished:
    """A version that every engine acknowledged. `seconds` in all; of these engines were paused `paused_seconds`, and
    `verify_seconds` were spent on asking for checksums. `drained` engines were lost on the way."""

    version: int
    transport: str
    nbytes: int
    engines: int
    seconds: float
    paused_seconds: float
    verify_seconds: float
    drained: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    """A complete checkpoint: the policy version and the step after which it was taken."""

    step: int
    version: int
    directory: Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPoint:
    """One evaluation of one data set under one policy version. `standard_error` is over prompts."""

    dataset: str
    version: int
    mode: str
    prompts: int
    samples: int
    mean: float
    standard_error: float
    truncated: float
    missing: int
    pass_at: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """What became of evaluating a version, by `placement`. `outcome` is `measured` (a data set has its point),
    `running`, `refused` (there is no point, or one of another version) or `skipped`; `dataset` and `mode` are empty
    where it is about all of them. `reason` says why."""

    version: int
    dataset: str
    mode: str
    placement: str
    outcome: str
    reason: str = ""
