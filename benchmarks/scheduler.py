"""What scheduler and buffer cost an episode, with many running: with the ledger on disk, in memory, and without.

    python benchmarks/scheduler.py [--running N ...] [--episodes N] [--repeats N]

Episodes end in random order; each is reported, its group scored, batches taken, and new episodes started, as the
producer does. Time is the thread's CPU time inside the scheduler's calls (what else the machine does is not in it); the
table has the median of the repeats.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.data.group import Episode, Prompt
from miles_core.data.trajectory import Status, Trajectory
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.policy import EpisodeStart, SchedulePolicy
from miles_core.rollout.scheduler import Scheduler

GROUP_SIZE = 8
CHUNK = 250
"""Episodes between two readings of the clock: making them is not measured."""


class NoLedger(Ledger):
    """Writes nothing down."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield

    def issue(self, group_id: str, *, position: int, prompt_id: str) -> None: ...

    def move(self, group_ids: Iterable[str], state: Any, **_: Any) -> None: ...


def prompt_at(position: int) -> Prompt:
    return Prompt(prompt_id=f"p{position}", messages=())


def ended(start: EpisodeStart, version: int) -> Episode:
    trajectory = Trajectory(
        token_ids=np.zeros(64, np.int32),
        loss_mask=np.arange(64) >= 16,
        logprobs=np.where(np.arange(64) >= 16, -1.0, 0.0).astype(np.float32),
        versions=np.where(np.arange(64) >= 16, version, -1).astype(np.int32),
        prompt_id=start.prompt.prompt_id,
        group_id=start.group_id,
        episode_id=start.episode_id,
        trajectory_id=f"{start.episode_id}.0",
        reward=1.0,
    )
    return Episode(
        episode_id=start.episode_id,
        prompt_id=start.prompt.prompt_id,
        group_id=start.group_id,
        status=Status.COMPLETED,
        trajectories=(trajectory,),
        reward=1.0,
    )


def measure(ledger: Ledger, *, running: int, episodes: int, seed: int) -> float:
    """Microseconds an episode, from its start to its batch, in the steady state."""
    batch_groups = max(8, running // GROUP_SIZE // 16)
    policy = SchedulePolicy(
        mode="async",
        batch_groups=batch_groups,
        group_size=GROUP_SIZE,
        retries=1,
        max_drops=0,
        max_running=running,
        capacity=64,
        max_staleness=1_000_000,
    )
    scheduler = Scheduler(policy, ledger, prompt_at, seed=seed)
    generator = random.Random(seed)
    version = 0
    scheduler.begin(0)
    going = scheduler.starts()
    assert scheduler.running_episodes == running
    seconds = 0.0
    for _ in range(episodes // CHUNK):
        _shuffle_tail(going, generator)
        chunk = [ended(going.pop(), version) for _ in range(CHUNK)]
        begin = time.thread_time()
        for episode in chunk:
            group = scheduler.episode_ended(episode)
            if group is not None:
                scheduler.group_scored(group, None)
                taken = scheduler.take(version)
                if taken is not None:
                    ledger.move([g.group_id for g in taken], "trained")
                    version += 1
                    scheduler.begin(version)
            going += scheduler.starts()
        seconds += time.thread_time() - begin
    return seconds / (episodes // CHUNK * CHUNK) * 1e6


def _shuffle_tail(going: list[EpisodeStart], generator: random.Random) -> None:
    """Random episodes to the end of the list, where they are taken from."""
    for place in range(len(going) - CHUNK, len(going)):
        other = generator.randrange(place + 1)
        going[place], going[other] = going[other], going[place]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print("| running episodes | without ledger, µs an episode | ledger in memory | ledger on disk |")
    print("|---|---|---|---|")
    for running in options.running:
        cells = []
        for kind in ("none", "memory", "disk"):
            times = []
            for seed in range(options.repeats):
                with tempfile.TemporaryDirectory() as scratch:
                    path = Path(scratch) / "ledger.sqlite" if kind == "disk" else Path(":memory:")
                    ledger = NoLedger(path) if kind == "none" else Ledger(path)
                    times.append(measure(ledger, running=running, episodes=options.episodes, seed=seed))
                    ledger.close()
            cells.append(f"{statistics.median(times):.1f}")
        print(f"| {running:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
