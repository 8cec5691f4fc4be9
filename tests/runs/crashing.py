"""Runs of the tiny example that are killed at random moments: controller, trainer or engine, synchronous or not.

A chain is one run, started and resumed until it has ended, that is killed `kills` times on its way. The moment of a
kill is drawn from the seed: a process that has just started, or `0` to `2` further steps and a part of a second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from miles_core.data.parquet import read_rollouts
from miles_core.rollout.ledger import Ledger
from miles_core.runs.audit import audit_run
from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore

__all__ = [
    "COMBINATIONS",
    "Chain",
    "Kill",
    "Mode",
    "Victim",
    "check_asynchronous",
    "crash",
    "left_behind",
    "outcome",
    "pids_of",
    "reference",
]

ROOT = Path(__file__).parents[2]
Victim = Literal["controller", "trainer", "engine"]
Mode = Literal["sync", "async"]
COMBINATIONS: list[tuple[Victim, Mode]] = [
    (v, m) for m in ("sync", "async") for v in ("controller", "trainer", "engine")
]

STEPS = 16
STALENESS = 1
_COMMON = (
    f"run.steps={STEPS}",
    "run.checkpoint_every=1",
    "schedule.batch_groups=2",
    "sampling.max_new_tokens=6",
    "schedule.group_size=4",
    "schedule.max_drops=200",
    "engine.restarts=50",
    "engine.threads=1",
    "evaluation.every=5",
)
_MODE: dict[Mode, tuple[str, ...]] = {
    "sync": (),
    "async": (
        "schedule.mode=async",
        f"schedule.max_staleness={STALENESS}",
        "schedule.max_running=16",
        "schedule.capacity=2",
    ),
}
_MODULES: dict[Victim, str] = {"trainer": "miles_core.training.worker", "engine": "miles_core.engines.embedded"}
_STARTING = 4.0
"""Seconds, at most, in which a kill hits a process that is starting."""
_DEADLINE = 240.0
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL: at which step the run was, what followed (`went on`, `stopped`, which `miles resume` continued), and
    how many seconds the run's processes needed to be gone where it stopped."""

    victim: Victim
    step: int
    followed: str
    gone_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """A run that was killed, and ended."""

    path: Path
    kills: tuple[Kill, ...]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "miles_core.cli.main", *arguments]


def _train(directory: Path, name: str, mode: Mode) -> list[str]:
    overrides = (f"run.directory={directory}", f"run.name={name}", *_COMMON, *_MODE[mode])
    settings = [part for override in overrides for part in ("--set", override)]
    return _command("train", "examples/tiny.toml", "--quiet", *settings)


def reference(directory: Path, mode: Mode) -> Path:
    """The uninterrupted run."""
    done = subprocess.run(
        _train(directory, f"reference-{mode}", mode),
        cwd=ROOT,
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory / f"reference-{mode}"


def crash(directory: Path, victim: Victim, mode: Mode, *, seed: int, kills: int) -> Chain:
    """Start a run, kill its victim `kills` times, resume it whenever it stopped, and let it end."""
    draw = random.Random(f"{seed}/{victim}/{mode}")
    path = directory / f"{victim}-{mode}-{seed}"
    done: list[Kill] = []
    end = time.monotonic() + _DEADLINE + 30 * kills
    while True:
        begun = (path / "config.json").exists()
        command = _command("resume", str(path), "--quiet") if begun else _train(directory, path.name, mode)
        with (directory / f"{path.name}.out").open("w+") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=_ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT)
            try:
                while len(done) < kills and (hit := _kill(process, path, victim, draw, seed)) is not None:
                    done.append(hit)
                    if hit.followed == "stopped":
                        break
                status = process.wait(max(end - time.monotonic(), 1.0))
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            said = out.read()
        gone = _gone(path)
        assert gone is not None, f"seed {seed}: processes outlived the run: {left_behind(path)}"
        if status == 0:
            return Chain(path=path, kills=tuple(done))
        assert done, said
        assert done[-1].followed == "stopped", f"seed {seed}: it stopped by itself: {said}"
        if victim != "controller":
            assert status == 1, said
            assert "miles resume" in said, said
            assert ".log" in said, said
        done[-1] = dataclasses.replace(done[-1], gone_seconds=gone)


def _kill(process: subprocess.Popen[bytes], path: Path, victim: Victim, draw: random.Random, seed: int) -> Kill | None:
    """Kill once; None when the run ended before the moment came."""
    further, part = draw.choice((None, 0, 1, 2)), draw.random()
    at = _step(path)
    until = time.monotonic() + (part * _STARTING if further is None else _DEADLINE)
    pids: list[int] = []
    while process.poll() is None:
        pids = [process.pid] if victim == "controller" else pids_of(path, victim)
        due = time.monotonic() >= until if further is None else _step(path) >= at + further and _serving(path)
        if pids and due:
            break
        time.sleep(0.01)
    if further is not None:
        time.sleep(part * 0.3)
    if process.poll() is not None:
        return None
    step = _step(path)
    print(f"seed {seed}: {victim} killed at step {step} ({'starting' if further is None else f'+{further}'})")
    try:
        os.kill(pids[0], signal.SIGKILL)
    except ProcessLookupError:
        return None
    if victim != "engine":
        return Kill(victim=victim, step=step, followed="stopped")
    return Kill(victim=victim, step=step, followed=_after_an_engine(process, path, pids[0]))


def _after_an_engine(process: subprocess.Popen[bytes], path: Path, killed: int) -> str:
    """Whether the run went on (another engine serves), or stopped."""
    end = time.monotonic() + _DEADLINE
    while process.poll() is None:
        assert time.monotonic() < end, "an engine is gone, and the run neither goes on nor stops"
        if [pid for pid in pids_of(path, "engine") if pid != killed]:
            return "went on"
        time.sleep(0.02)
    return "stopped" if process.returncode else "went on"


def _step(path: Path) -> int:
    """Steps whose batch is on disk."""
    return len(list((path / "rollouts").glob("step-*.parquet")))


def _serving(path: Path) -> bool:
    return (path / "wire.sqlite").exists()


def pids_of(path: Path, victim: Victim) -> list[int]:
    """Processes of the trainer, or of engines, of the run in `path`."""
    return [pid for pid, line in _processes(path) if _MODULES[victim] in line]


def left_behind(path: Path) -> list[str]:
    """Command lines of processes that still work for the run in `path`, by their command line or log."""
    return [line for _, line in _processes(path)]


def _processes(path: Path) -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "miles_core" not in line:
                continue
            logs = [os.readlink(file) for file in (entry / "fd").iterdir()]
        except OSError:
            continue
        if int(entry.name) != os.getpid() and any(f"{path}/" in f"{text}/" for text in (*line.split(), *logs)):
            found.append((int(entry.name), line))
    return found


def _gone(path: Path, seconds: float = 30.0) -> float | None:
    """Seconds until nothing works for the run any more; None when something still does after `seconds`."""
    begin = time.monotonic()
    while left_behind(path):
        if time.monotonic() > begin + seconds:
            return None
        time.sleep(0.02)
    return time.monotonic() - begin


def outcome(path: Path) -> dict[str, object]:
    """Everything of a synchronous run that must not depend on interruptions."""
    run = RunDirectory.open(path, write=False)
    ledger, store = Ledger(run.ledger_file), MetricsStore(run.metrics_file)
    try:
        entries = [(e.group_id, e.prompt_id, e.state, e.step, e.version, e.reason) for e in ledger.entries()]
        assert ledger.check().holds
        metrics = [row for row in store.rows() if row[0] in ("train", "rollout", "eval")]
        points = store.evaluations()
    finally:
        ledger.close()
        store.close()
    rollouts = []
    for step in range(1, STEPS + 1):
        for t in read_rollouts(run.rollout_file(step)):
            columns = (t.token_ids, t.loss_mask, t.logprobs, t.versions)
            rollouts.append((t.trajectory_id, t.reward, *(c.tobytes() for c in columns)))
    weights = hashlib.sha256((run.export_directory / "model.safetensors").read_bytes()).hexdigest()
    return {"ledger": entries, "metrics": metrics, "evaluations": points, "rollouts": rollouts, "weights": weights}


def check_asynchronous(path: Path) -> None:
    """Every issued prompt is trained once, dropped with its reason, or was open when the last step was taken; versions
    go on; no trained token is over the bound; and what trained is what was sampled."""
    run = RunDirectory.open(path, write=False)
    ledger = Ledger(run.ledger_file)
    try:
        counts = ledger.check()
        assert counts.trained == 2 * STEPS
        rows = ledger._db.execute(
            "SELECT state, reason, COUNT(*), COUNT(DISTINCT position) FROM groups GROUP BY state, reason"
        ).fetchall()
        positions = [p for (p,) in ledger._db.execute("SELECT position FROM groups ORDER BY position")]
        versions = [v for (v,) in ledger._db.execute("SELECT version FROM groups WHERE state = 'trained'")]
    finally:
        ledger.close()
    assert positions == list(range(counts.issued)), "a prompt was left out of the issue order"
    for state, reason, groups, distinct in rows:
        assert groups == distinct
        assert state != "dropped" or reason, "a drop without a reason"
    assert Counter(versions) == dict.fromkeys(range(1, STEPS + 1), 2)
    seen: set[str] = set()
    for step in range(STEPS):
        for t in read_rollouts(run.rollout_file(step + 1)):
            ages = step - t.versions[t.loss_mask]
            assert (ages >= 0).all(), f"{t.trajectory_id}: {ages}"
            assert (ages <= STALENESS).all(), f"{t.trajectory_id}: {ages}"
            assert t.trajectory_id not in seen, f"{t.trajectory_id} was trained twice"
            seen.add(t.trajectory_id)
    result = audit_run(run)
    assert result.hard_mismatches == 0, result.text
