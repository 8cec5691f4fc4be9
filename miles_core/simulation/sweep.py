"""A grid of scenarios, each under several seeds."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from miles_core.errors import ConfigError, Problem
from miles_core.simulation.outcome import Outcome
from miles_core.simulation.scenario import load_scenario
from miles_core.simulation.schedule import simulate

__all__ = ["Row", "grid", "sweep"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One point of the grid: the overrides that make it, as `key=value`, and one outcome a seed."""

    overrides: tuple[str, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def label(self) -> str:
        """The overrides without their sections."""
        return ", ".join(f"{o.partition('=')[0].rpartition('.')[2]} {o.partition('=')[2]}" for o in self.overrides)

    def mean(self, number: Callable[[Outcome], float]) -> tuple[float, float]:
        """Mean over seeds, and the standard deviation between them (0 for one seed)."""
        values = [float(number(outcome)) for outcome in self.outcomes]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def grid(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of `key=a,b,c` options, the last changing fastest. Commas inside brackets do not part values.
    Raises `ConfigError` for an option that is none."""
    axes: list[list[str]] = []
    for option in sweeps:
        key, equals, text = option.partition("=")
        values = [value.strip() for value in _parts(text)]
        if not equals or "." not in key or not all(values):
            raise ConfigError([Problem(key="--sweep", value=option, message="must look like section.key=a,b,c")])
        axes.append([f"{key.strip()}={value}" for value in values])
    return list(itertools.product(*axes))


def sweep(path: Path, overrides: Sequence[str], sweeps: Sequence[str], *, seeds: int) -> Iterator[Row]:
    """Simulate every point of the grid under `seeds` seeds, counted from the scenario's. All points are read before the
    first is simulated, so that a bad one costs no waiting."""
    points = grid(sweeps)
    scenarios = [load_scenario(path, [*overrides, *point]) for point in points]
    for point, scenario in zip(points, scenarios, strict=True):
        first = scenario.simulation.seed
        seeded = [
            scenario.model_copy(update={"simulation": scenario.simulation.model_copy(update={"seed": first + k})})
            for k in range(seeds)
        ]
        yield Row(overrides=point, outcomes=tuple(simulate(one) for one in seeded))


def _parts(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
