"""Comparison: replicates are found by config, and significance is Welch's test."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from miles_core.errors import RunDirectoryError
from miles_core.runs.compare import compare_runs, two_sided_p, welch


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [
        (12.7062, 1, 0.05),
        (2.776445, 4, 0.05),
        (4.604095, 4, 0.01),
        (2.228139, 10, 0.05),
        (1.959964, float("inf"), 0.05),
    ],
)
def test_two_sided_p_equals_the_table(t: float, freedom: float, p: float) -> None:
    assert two_sided_p(t, freedom) == pytest.approx(p, rel=1e-5)
    assert two_sided_p(-t, freedom) == two_sided_p(t, freedom)


def test_welch_of_equal_samples_has_pooled_freedom() -> None:
    difference, error, freedom = welch((0.2, 0.03, 2.0), (0.5, 0.03, 2.0))
    assert difference == pytest.approx(0.3)
    assert error == pytest.approx(0.03 * 2**0.5)
    assert freedom == pytest.approx(4.0)


def _variant(source: Path, target: Path, *, seed: int, size: int, mean: float) -> Path:
    shutil.copytree(source, target)
    stored = orjson.loads((target / "config.json").read_bytes())
    stored["config"]["run"] |= {"name": target.name, "seed": seed}
    stored["config"]["schedule"]["group_size"] = size
    (target / "config.json").write_bytes(orjson.dumps(stored))
    with closing(sqlite3.connect(target / "metrics.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE metrics SET value = ? WHERE kind = 'eval' AND name = 'heldout/sampled/mean'", (mean,))
    return target


def test_seeds_are_replicates_and_a_real_difference_is_significant(finished_run: Path, tmp_path: Path) -> None:
    means = {4: [0.50, 0.51, 0.49], 8: [0.80, 0.79, 0.81]}
    paths = [
        _variant(finished_run, tmp_path / f"{size}-{seed}", seed=seed, size=size, mean=mean)
        for size, values in means.items()
        for seed, mean in enumerate(values)
    ]
    text = compare_runs(paths)
    assert "3 replicates: 4-0, 4-1, 4-2" in text
    assert "schedule.group_size: 4 against 8" in text
    line = next(one for one in text.splitlines() if "heldout/sampled: +0.3" in one)
    assert ": significant" in line


def test_noise_is_not_significant_and_single_runs_are_cautioned(finished_run: Path, tmp_path: Path) -> None:
    paths = [
        _variant(finished_run, tmp_path / str(size), seed=0, size=size, mean=mean)
        for size, mean in ((4, 0.9900), (8, 0.9901))
    ]
    line = next(one for one in compare_runs(paths).splitlines() if "heldout/sampled: +" in one)
    assert "not significant" in line
    assert "says nothing about seeds" in line


def test_a_run_without_evaluation(run_copy: Path) -> None:
    with closing(sqlite3.connect(run_copy / "metrics.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM metrics WHERE kind = 'eval'")
    with pytest.raises(RunDirectoryError, match="no held-out evaluation"):
        compare_runs([run_copy])
