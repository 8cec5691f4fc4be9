"""The published figures, and the constants that they give."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from miles_core.simulation.sync_model import FITTED, Costs, broadcast_seconds, p2p_seconds
from miles_core.simulation.sync_scenario import SyncScenario, sync_scenario_of

__all__ = ["OUTLIERS", "PUBLISHED", "Figure", "Observation", "fit", "leave_one_out", "observations"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One row: nodes of eight H100, buckets of 1 GB."""

    name: str
    scenario: SyncScenario
    broadcast: float
    """Seconds by broadcast."""
    p2p: float
    """Seconds by one-sided writes."""


def _figure(name: str, model: str, layouts: str, broadcast: float, p2p: float, engine_seconds: float = 0.0) -> Figure:
    """`layouts`: the trainer's and the engines', as TOML."""
    tree = tomllib.loads(layouts)
    tree |= {"model": {"like": model}, "publish": {"engine_seconds": engine_seconds}}
    return Figure(name=name, scenario=sync_scenario_of(tree, {}), broadcast=broadcast, p2p=p2p)


PUBLISHED: tuple[Figure, ...] = (
    _figure(
        "GLM-4.7-9B-Flash",
        "glm-4.7-flash",
        """
        trainer = { nodes = 1, tensor = 4, expert = 8 }
        engines = { nodes = 1, tensor = 4 }
        """,
        broadcast=2.509,
        p2p=4.229,
    ),
    _figure(
        "GLM-5, 4 layers",
        "glm-5-4-layers",
        """
        trainer = { nodes = 1, tensor = 4, expert = 8 }
        engines = { nodes = 1, tensor = 8 }
        """,
        broadcast=0.732,
        p2p=1.261,
    ),
    _figure(
        "Qwen3-30B-A3B",
        "qwen3-30b-a3b",
        """
        trainer = { nodes = 2, tensor = 4, expert = 8 }
        engines = { nodes = 2, tensor = 8 }
        """,
        broadcast=2.670,
        p2p=2.160,
    ),
    _figure(
        "GLM-4.5-Air",
        "glm-4.5-air",
        """
        trainer = { nodes = 4, pipeline = 4, expert = 8 }
        engines = { nodes = 4, tensor = 8 }
        """,
        broadcast=5.001,
        p2p=2.637,
    ),
    _figure(
        "Qwen3-235B-A22B",
        "qwen3-235b-a22b",
        """
        trainer = { nodes = 8, tensor = 4, pipeline = 4, context = 2, expert = 16 }
        engines = { nodes = 8, tensor = 32 }
        """,
        broadcast=10.754,
        p2p=3.162,
    ),
    _figure(
        "GLM-5",
        "glm-5",
        """
        trainer = { nodes = 16, tensor = 4, pipeline = 8, context = 2, expert = 16 }
        engines = { nodes = 16, tensor = 64 }
        """,
        broadcast=58.302,
        p2p=8.480,
    ),
    _figure(
        "Kimi-K2",
        "kimi-k2",
        """
        trainer = { nodes = 32, tensor = 8, pipeline = 8, context = 4, expert = 32 }
        engines = { nodes = 32, tensor = 32 }
        """,
        broadcast=53.279,
        p2p=7.227,
        engine_seconds=0.884,
    ),
)
"""H100-80GB nodes of eight, from pause to resume without both; Kimi-K2's engines requantize for 0.884 s."""

OUTLIERS = frozenset({("GLM-5", "broadcast")})
"""Not fitted: what this model leaves out slowed this one down."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One published number."""

    figure: Figure
    transport: str
    seconds: float

    def predicted(self, costs: Costs) -> float:
        """Seconds that the model gives."""
        model = broadcast_seconds if self.transport == "broadcast" else p2p_seconds
        return sum(model(self.figure.scenario, costs).values())

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted to it."""
        return (self.figure.name, self.transport) not in OUTLIERS


def observations() -> list[Observation]:
    """All fourteen."""
    return [
        Observation(figure=figure, transport=transport, seconds=getattr(figure, transport))
        for figure in PUBLISHED
        for transport in ("broadcast", "p2p")
    ]


def fit(chosen: Sequence[Observation], start: Costs = FITTED) -> Costs:
    """The constants with the smallest sum of squared relative errors over `chosen`, all positive: Levenberg's method
    on their logarithms."""

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        costs = Costs(**dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.array([o.predicted(costs) / o.seconds - 1 for o in chosen])

    names = [field.name for field in dataclasses.fields(Costs)]
    logs = np.log([getattr(start, name) for name in names])
    return Costs(**dict(zip(names, np.exp(_least_squares(errors, logs)).tolist(), strict=True)))


def leave_one_out() -> dict[str, dict[str, float]]:
    """By model and transport: seconds that the model gives with constants fitted to all other models."""
    found: dict[str, dict[str, float]] = {}
    for figure in PUBLISHED:
        costs = fit([o for o in observations() if o.fitted and o.figure is not figure])
        found[figure.name] = {o.transport: o.predicted(costs) for o in observations() if o.figure is figure}
    return found


def _least_squares(
    errors: Callable[[NDArray[np.float64]], NDArray[np.float64]], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    damping, step, now = 1e-3, 1e-5, errors(x)
    while damping < 1e9:
        jacobian = np.stack([(errors(x + step * axis) - now) / step for axis in np.eye(len(x))], axis=1)
        move = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(x)), -jacobian.T @ now)
        then = errors(x + move)
        if now @ now - then @ then > 1e-9:
            x, now, damping = x + move, then, damping / 3
        else:
            damping *= 10
    return x
