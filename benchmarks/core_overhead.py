"""Where a step's time goes on the tiny run: sampling, forward and backward, and everything else (the core's share).

    python benchmarks/core_overhead.py [CONFIG] [--steps N] [--threads N]

Sampling is the time that the engine's thread computes; forward, backward and optimizer are the trainer's own clocks;
the rest is scheduling, transport of requests and batches, recording, publishing and verification.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "examples" / "tiny.toml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    from miles_core.runs.metrics import MetricsStore

    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "miles_core.cli.main", "train", str(options.config), "--quiet"]
        for setting in (
            f"run.directory={scratch}",
            "run.name=overhead",
            f"run.steps={options.steps}",
            f"engine.threads={options.threads}",
            "evaluation.datasets=[]",
        ):
            command += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        store = MetricsStore(Path(scratch) / "overhead" / "metrics.sqlite")
        steps = range(3, options.steps + 1)
        spans = [s for s in store.spans() if s[1] in ("generate", "train", "publish")]
        series = {name: dict(store.series("time", name)) for name in store.names("time")}
        store.close()
    rows: dict[str, list[float]] = {"whole step": [], "sampling": [], "forward and backward": [], "optimizer": []}
    for step in steps:
        own = [s for s in spans if s[2] == step]
        rows["whole step"].append(max(s[4] for s in own) - min(s[3] for s in own))
        rows["sampling"].append(series["engine/busy_seconds"][step])
        rows["forward and backward"].append(series["backend/forward_backward"][step])
        rows["optimizer"].append(series["backend/optimizer"][step])
    model = [sum(rows[name][i] for name in rows if name != "whole step") for i in range(len(rows["whole step"]))]
    rows["everything else"] = [whole - m for whole, m in zip(rows["whole step"], model, strict=True)]
    median = statistics.median(rows["whole step"])
    print(f"{options.config.stem}, {options.steps} steps, {options.threads} thread(s), medians")
    for name, values in rows.items():
        value = statistics.median(values)
        print(f"{name:<22} {1000 * value:>8.1f} ms {100 * value / median:>6.1f} %")


if __name__ == "__main__":
    main()
