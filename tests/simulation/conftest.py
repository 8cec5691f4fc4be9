"""A small scenario for every test, and how to change it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from miles_core.simulation.scenario import Scenario, override_key, scenario_of

SMALL: dict[str, Any] = {
    "simulation": {"steps": 12, "warmup": 2},
    "schedule": {
        "mode": "async",
        "batch_groups": 3,
        "group_size": 4,
        "max_running": 24,
        "max_drops": 100000,
        "episode_timeout": 1e6,
    },
    "engines": {"count": 2, "slots": 8, "decode": [[1, 50.0], [8, 200.0]], "prefill": 5000.0},
    "episodes": {
        "turns": {"values": [1, 2, 3]},
        "prompt_tokens": 40,
        "tokens": {"median": 60.0, "sigma": 0.8},
        "tool_seconds": {"median": 1.0, "sigma": 1.0},
        "tool_tokens": 10,
    },
    "trainer": {"train_seconds": 8.0, "publish_seconds": 0.5},
}


def small(*overrides: str) -> Scenario:
    tree = deepcopy(SMALL)
    for override in overrides:
        override_key(tree, {}, override)
    return scenario_of(tree, {})


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    """`scenario("schedule.stale='drop'", …)`."""
    return small
