"""Where a step's time goes on the tiny run: sampling, forward and backward, and everything else (the core's share).

    python benchmarks/core_overhead.py [CONFIG ...] [--steps N] [--threads N]

Without a config it measures the tiny example and the same task in the shape of real work, `examples/fewshot.toml`.

Sampling is the time that the engine's thread computes; forward, backward and optimizer are the trainer's own clocks;
the rest is scheduling, transport of requests and batches, recording, publishing and verification. "Everything else, a
sample" is that time over the samples of a step.
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
    """Print one table a config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    examples = [ROOT / "examples" / name for name in ("tiny.toml", "fewshot.toml")]
    parser.add_argument("configs", nargs="*", type=Path, default=examples)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for config in options.configs:
        rows, samples = measure(config, options.steps, options.threads)
        median = statistics.median(rows["whole step"])
        print(f"{config.stem}, {options.steps} steps, {options.threads} thread(s), {samples} samples a step, medians")
        for name, values in rows.items():
            value = statistics.median(values)
            print(f"{name:<26} {1000 * value:>8.2f} ms {100 * value / median:>6.1f} %")
        print(f"{'everything else, a sample':<26} {1000 * value / samples:>8.2f} ms")


def measure(config: Path, steps: int, threads: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each part in every step after the first two, "everything else" last; and the samples of a step."""
    from miles_core.config.load import load_config
    from miles_core.runs.metrics import MetricsStore

    schedule = load_config(config).config.schedule
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "miles_core.cli.main", "train", str(config), "--quiet"]
        for setting in (
            f"run.directory={scratch}",
            "run.name=overhead",
            f"run.steps={steps}",
            f"engine.threads={threads}",
            "evaluation.datasets=[]",
        ):
            command += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        store = MetricsStore(Path(scratch) / "overhead" / "metrics.sqlite")
        spans = [s for s in store.spans() if s[1] in ("generate", "train", "publish")]
        series = {name: dict(store.series("time", name)) for name in store.names("time")}
        store.close()
    rows: dict[str, list[float]] = {"whole step": [], "sampling": [], "forward and backward": [], "optimizer": []}
    for step in range(3, steps + 1):
        own = [s for s in spans if s[2] == step]
        rows["whole step"].append(max(s[4] for s in own) - min(s[3] for s in own))
        rows["sampling"].append(series["engine/busy_seconds"][step])
        rows["forward and backward"].append(series["backend/forward_backward"][step])
        rows["optimizer"].append(series["backend/optimizer"][step])
    model = [sum(rows[name][i] for name in rows if name != "whole step") for i in range(len(rows["whole step"]))]
    rows["everything else"] = [whole - m for whole, m in zip(rows["whole step"], model, strict=True)]
    return rows, schedule.batch_groups * schedule.group_size


if __name__ == "__main__":
    main()
