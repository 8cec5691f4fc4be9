"""Kill −9 at random moments, resume, and get the uninterrupted run: weights, ledger, metrics and rollouts to the
bit."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.data.parquet import read_rollouts
from miles_core.rollout.ledger import Ledger
from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny.toml"
STEPS = 6


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "miles_core.cli.main", *arguments]


def start(directory: Path, name: str) -> list[str]:
    overrides = [f"run.directory={directory}", f"run.name={name}", f"run.steps={STEPS}", "run.checkpoint_every=1"]
    return command("train", str(CONFIG), "--quiet", *(part for o in overrides for part in ("--set", o)))


def outcome(path: Path) -> dict[str, object]:
    """Everything that must not depend on interruptions."""
    run = RunDirectory.open(path, write=False)
    ledger = Ledger(run.ledger_file)
    store = MetricsStore(run.metrics_file)
    try:
        entries = [(e.group_id, e.prompt_id, e.state, e.step, e.version, e.reason) for e in ledger.entries()]
        assert ledger.check().holds
        metrics = [row for row in store.rows() if row[0] in ("train", "rollout", "eval")]
    finally:
        ledger.close()
        store.close()
    rollouts = []
    for step in range(1, STEPS + 1):
        for t in read_rollouts(run.rollout_file(step)):
            columns = (t.token_ids, t.loss_mask, t.logprobs, t.versions)
            rollouts.append((t.trajectory_id, t.reward, *(c.tobytes() for c in columns)))
    weights = hashlib.sha256((run.export_directory / "model.safetensors").read_bytes()).hexdigest()
    return {"ledger": entries, "metrics": metrics, "rollouts": rollouts, "weights": weights}


def descendants(directory: Path) -> list[str]:
    """Processes that still work for a run in `directory`, by their command line or log."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            logs = [os.readlink(f) for f in (entry / "fd").iterdir()]
        except (OSError, ProcessLookupError):
            continue
        if int(entry.name) != os.getpid() and any(str(directory) in text for text in (line, *logs)):
            found.append(line)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], float]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    begin = time.monotonic()
    subprocess.run(start(directory, "reference"), check=True, capture_output=True)
    return outcome(directory / "reference"), time.monotonic() - begin


def crash_and_resume(directory: Path, seed: int, kills: int, seconds: float) -> Path:
    """Start a run, kill its controller `kills` times at random moments, resume it each time, and let it end."""
    generator = random.Random(seed)
    path = directory / "crashed"
    for number in range(kills):
        resume = (path / "config.json").exists()
        process = subprocess.Popen(
            command("resume", str(path), "--quiet") if resume else start(directory, "crashed"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        delay = generator.uniform(0.3, 1.0) * seconds
        print(f"seed {seed}: kill {number} after {delay:.2f} s")
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    end = time.monotonic() + 20
    while (left := descendants(directory)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, f"processes outlived the run: {left}"
    done = subprocess.run(command("resume", str(path), "--quiet"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_ends_as_the_uninterrupted_one(
    uninterrupted: tuple[dict[str, object], float], tmp_path: Path, seed: int
) -> None:
    expected, seconds = uninterrupted
    found = outcome(crash_and_resume(tmp_path, seed, kills=3, seconds=seconds))
    for part in expected:
        assert found[part] == expected[part], part


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 125))
def test_a_hundred_kills(uninterrupted: tuple[dict[str, object], float], tmp_path: Path, seed: int) -> None:
    expected, seconds = uninterrupted
    found = outcome(crash_and_resume(tmp_path, seed, kills=4, seconds=seconds))
    for part in expected:
        assert found[part] == expected[part], part
