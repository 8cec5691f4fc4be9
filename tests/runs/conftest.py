"""One finished tiny run, shared by the tests that read it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def train(directory: Path, name: str, *overrides: str) -> Path:
    """Train the tiny example for 4 steps and return the run's path."""
    settings = [f"run.directory={directory}", f"run.name={name}", "run.steps=4", "run.checkpoint_every=2", *overrides]
    command = [sys.executable, "-m", "miles_core.cli.main", "train", "examples/tiny.toml", "--quiet"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Run directory   {directory / name}" in done.stdout
    return directory / name


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    return train(tmp_path_factory.mktemp("runs"), "finished")


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


@pytest.fixture(scope="session")
def nightly_table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where nightly chains write a line each; at the end they become the page of the docs."""
    from tests.runs.crash_table import table_of

    lines = tmp_path_factory.mktemp("crashes") / "chains.jsonl"
    yield lines
    if lines.exists():
        page = ROOT / "docs" / "nightly" / "crashes.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(table_of([json.loads(line) for line in lines.read_text().splitlines()]))
