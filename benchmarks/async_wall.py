"""Wall time of synchronous and asynchronous schedules at the same number of trained groups, on a heavy-tailed task.

    python benchmarks/async_wall.py [--steps N] [--repeats N] [--virtual]

The producer and the scheduler are those of a run; episodes are three tool calls that sleep for log-normal times (median
0.1 s, sigma 1), a train step takes 0.5 s, and the engine answers at once: what is measured is waiting. `--virtual` lets
the time jump, so that nothing but the schedule is in the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from miles_core.rollout.policy import SchedulePolicy
from miles_core.testing.heavy_tail import HeavyTail, VirtualLoop, Wall, measure_wall

BASE: dict[str, Any] = {
    "batch_groups": 8,
    "group_size": 8,
    "retries": 2,
    "max_drops": 0,
    "max_running": 128,
    "max_staleness": 4,
    "stale": "resample",
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "sync, over_sample 4": {"mode": "sync", "over_sample": 4},
    "sync, over_sample 4, partial": {"mode": "sync", "over_sample": 4, "partial": True},
    "async": {"mode": "async", "capacity": 3},
    "async, adaptive (target 2)": {"mode": "async", "capacity": 4, "adaptive": True, "target_staleness": 2.0},
}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--virtual", action="store_true")
    options = parser.parse_args()
    print("| schedule | wall, s | of sync | trainer idle, s | mean staleness |")
    print("|---|---|---|---|---|")
    sync = 0.0
    for name, changes in SCHEDULES.items():
        walls: list[Wall] = []
        for seed in range(options.repeats):
            work = measure_wall(
                SchedulePolicy(**BASE, **changes),
                HeavyTail(train_seconds=0.5, tool_seconds=0.1, seed=seed),
                steps=options.steps,
            )
            with asyncio.Runner(loop_factory=VirtualLoop if options.virtual else None) as runner:
                walls.append(runner.run(work))
        seconds = statistics.median(w.seconds for w in walls)
        sync = sync or seconds
        idle = statistics.median(w.trainer_idle for w in walls)
        staleness = statistics.median(w.staleness for w in walls)
        print(f"| {name} | {seconds:.1f} | {seconds / sync:.2f} | {idle:.1f} | {staleness:.2f} |", flush=True)


if __name__ == "__main__":
    main()
