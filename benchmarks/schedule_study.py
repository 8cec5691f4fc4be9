"""The study of docs/scheduling-study.md: answers to stale groups, slots, capacity, bounds, on the reference workload.

    python benchmarks/schedule_study.py [--seeds N] [--steps N] [--processes N] [--plots DIRECTORY]

Everything is simulated: the scheduler and the buffer are the product's, engines, tools and trainer are those of
examples/simulations/reference.toml. Prints its tables; with `--plots`, writes the frontiers there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from multiprocessing import Pool
from pathlib import Path

from miles_core.simulation.frontier import Spot, frontier_svg
from miles_core.simulation.outcome import Outcome
from miles_core.simulation.scenario import load_scenario
from miles_core.simulation.schedule import simulate
from miles_core.simulation.sweep import Row

SCENARIO = Path(__file__).parents[1] / "examples" / "simulations" / "reference.toml"
ANSWERS = {"discard": "drop", "reweight": "reweight", "resample": "resample"}
COLUMNS: dict[str, tuple[Callable[[Outcome], float], str]] = {
    "trainer idle, %": (lambda o: 100 * o.trainer_idle, ".1f"),
    "steps/h": (lambda o: o.steps_per_hour, ".2f"),
    "trained tokens/s": (lambda o: o.tokens_per_second, ".0f"),
    "staleness": (lambda o: o.staleness_mean, ".2f"),
    "of tokens": (lambda o: o.token_staleness, ".2f"),
    "wasted, %": (lambda o: 100 * o.wasted, ".1f"),
    "generating": (lambda o: o.generating, ".0f"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A line of a table: what it is called, and what it changes in the scenario."""

    table: str
    name: tuple[str, ...]
    overrides: tuple[str, ...]


def points() -> Iterable[Point]:
    capacities = [("episode", n) for n in (1, 2, 3, 4, 6, 8)] + [("group", n) for n in (2, 4, 8)]
    for (name, answer), (slot, capacity) in itertools.product(ANSWERS.items(), capacities):
        yield Point(
            table="capacity",
            name=(f"{name}, {slot} slots", str(capacity)),
            overrides=(
                f"schedule.stale='{answer}'",
                f"schedule.slot='{slot}'",
                f"schedule.capacity={capacity}",
                "schedule.max_staleness=4",
            ),
        )
    for (name, answer), bound in itertools.product(ANSWERS.items(), (2, 3, 4, 6)):
        yield Point(
            table="bound",
            name=(name, str(bound)),
            overrides=(f"schedule.stale='{answer}'", "schedule.capacity=4", f"schedule.max_staleness={bound}"),
        )
    for target in (1.0, 2.0, 2.5, 3.0):
        yield Point(
            table="adaptive",
            name=("adaptive, resample", str(target)),
            overrides=(
                "schedule.stale='resample'",
                "schedule.adaptive=true",
                f"schedule.target_staleness={target}",
                "schedule.capacity=8",
                "schedule.max_staleness=4",
            ),
        )


def run(task: tuple[tuple[str, ...], int]) -> Outcome:
    overrides, seed = task
    return simulate(load_scenario(SCENARIO, [*overrides, f"simulation.seed={seed}"]))


def table(title: str, found: dict[Point, Row], key: str) -> str:
    lines = [f"| | {key} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for point, row in found.items():
        if point.table == title:
            cells = []
            for number, form in COLUMNS.values():
                mean, spread = row.mean(number)
                cells.append(f"{mean:{form}} ± {spread:.1g}" if spread else f"{mean:{form}}")
            lines.append(f"| {' | '.join(point.name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: dict[Point, Row], names: tuple[str, ...], *, title: str) -> str:
    spots = []
    for point, row in found.items():
        if point.table in names:
            (x, dx), (y, dy) = row.mean(lambda o: o.token_staleness), row.mean(lambda o: 100 * o.trainer_idle)
            series, label = point.name
            spots.append(Spot(x=x, y=y, dx=dx, dy=dy, series=series, label=label))
    return frontier_svg(
        spots, title=title, x_label="mean staleness of trained tokens, versions", y_label="trainer idle, %"
    )


def main() -> None:
    """Simulate every point under every seed; print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args()
    length = (f"simulation.steps={options.steps}", "simulation.warmup=6")
    todo = list(points())
    tasks = [((*length, *point.overrides), seed) for point in todo for seed in range(options.seeds)]
    with Pool(options.processes) as pool:
        outcomes = iter(pool.map(run, tasks, chunksize=1))
    found = {
        point: Row(overrides=point.overrides, outcomes=tuple(itertools.islice(outcomes, options.seeds)))
        for point in todo
    }
    for name, key in (("capacity", "capacity"), ("bound", "max_staleness"), ("adaptive", "target")):
        print(f"{table(name, found, key)}\n")
    if options.plots is not None:
        title = "Staleness against idle time by capacity, max_staleness 4"
        (options.plots / "scheduling-study-capacity.svg").write_text(plot(found, ("capacity",), title=title))
        title = "The same by max_staleness (capacity 4), and by adaptive target"
        (options.plots / "scheduling-study-bound.svg").write_text(plot(found, ("bound", "adaptive"), title=title))


if __name__ == "__main__":
    main()
