"""`[backend] nproc = 2` in a config: a whole run, with engines, publishing, a checkpoint and an export."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def miles(*arguments):
    command = [sys.executable, "-m", "miles_core.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(directory, nproc):
    settings = ["run.steps=2", f"run.name=n{nproc}", f"run.directory={directory}", f"backend.nproc={nproc}"]
    miles("train", "examples/tiny.toml", "--quiet", *(part for s in settings for part in ("--set", s)))
    connection = sqlite3.connect(directory / f"n{nproc}" / "metrics.sqlite")
    rows = connection.execute("select name, value from metrics where kind = 'train' and step = 1").fetchall()
    connection.close()
    return dict(rows)


def test_two_processes_train_as_one_does(tmp_path):
    one, two = train(tmp_path, 1), train(tmp_path, 2)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert (tmp_path / "n2" / "logs" / "trainer-1.log").exists()
    assert "hard mismatches: 0" in miles("audit", tmp_path / "n2")
    assert "model.safetensors" in {path.name for path in (tmp_path / "n2" / "export").iterdir()}
