"""An engine that ends and may not be started again stops the run at once, whatever the run was waiting for."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs.crashing import ROOT, left_behind, pids_of

pytest.importorskip("torch")


def measuring(run: Path) -> bool:
    """Whether the run's first evaluation is under way."""
    try:
        with sqlite3.connect(f"file:{run / 'metrics.sqlite'}?mode=ro", uri=True) as metrics:
            return bool(metrics.execute("select 1 from evaluations where outcome = 'running'").fetchall())
    except sqlite3.OperationalError:  # it is not there yet
        return False


def test_an_evaluation_does_not_wait_for_an_engine_that_is_gone(tmp_path: Path) -> None:
    settings = (
        f"run.directory={tmp_path}",
        "run.name=lost",
        "engine.restarts=0",
        "engine.threads=1",
        "sampling.max_new_tokens=400",
    )
    command = [sys.executable, "-m", "miles_core.cli.main", "train", "examples/tiny.toml", "--quiet"]
    command += [part for setting in settings for part in ("--set", setting)]
    run = tmp_path / "lost"
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            end = time.monotonic() + 120
            while not measuring(run):
                assert process.poll() is None, process.stdout.read()
                assert time.monotonic() < end, "no evaluation began"
                time.sleep(0.02)
            (engine,) = pids_of(run, "engine")
            os.kill(engine, signal.SIGKILL)
            said, _ = process.communicate(timeout=60)  # requests have ten minutes
        finally:
            process.kill()
    assert process.returncode == 1
    assert "engine.restarts = 0 allows no further start" in said
    assert "miles resume" in said
    assert not left_behind(run)
