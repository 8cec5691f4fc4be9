"""Routed experts over turns: every row comes from the engine, and a missing one is an error."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from miles_core.contracts.engines import Generation
from miles_core.errors import EngineError
from miles_core.tito.export import Identity, export
from miles_core.tito.routes import new_routes
from miles_core.tito.tree import Node, SessionTree
from tests.tito.test_tree import added

NAMES = Identity(prompt_id="p", group_id="g", episode_id="e")


def generation(prompt: int, sampled: int, *, start: int = 0, missing: int = 0, turn: int = 1) -> Generation:
    """Row i of turn t is 100 t + i, on one layer with one expert."""
    rows = np.arange(start, prompt + sampled - 1 - missing, dtype=np.int32) + 100 * turn
    return Generation(
        token_ids=np.ones(sampled, np.int32),
        logprobs=np.zeros(sampled, np.float32),
        versions=np.zeros(sampled, np.int32),
        finish_reason="stop",
        engine="e",
        prompt_tokens=prompt,
        cached_tokens=0,
        started=0.0,
        finished=0.0,
        routed_experts=rows.reshape(-1, 1, 1),
        routed_start=start,
    )


def two_turns(second: Generation) -> Any:
    tree = SessionTree()
    routes = new_routes(Node(None, (), None, 0), 0, 3, [generation(3, 2)])
    tree.commit(tree.plan(b"", (b"u",)), b"a", dataclasses.replace(added(1, [1, 2, 3], [4, 5]), routes=routes))
    plan = tree.plan(b"", (b"u", b"a", b"v"))
    routes = new_routes(plan.parent, 0, 1, [second])
    tree.commit(plan, b"b", dataclasses.replace(added(2, [6], [7, 8]), routes=routes))
    return export(tree, NAMES)[0]


@pytest.mark.parametrize("start", [0, 4])
def test_rows_of_an_earlier_turn_stay(start: int):
    trajectory = two_turns(generation(6, 2, start=start, turn=2))
    assert trajectory.routed_experts[:, 0, 0].tolist() == [100, 101, 102, 103, 204, 205, 206]


@pytest.mark.parametrize("broken", [{"start": 5}, {"missing": 1}])
def test_a_missing_row_is_an_error(broken: dict[str, int]):
    with pytest.raises(EngineError, match="rows 4 up to 7 are needed"):
        two_turns(generation(6, 2, turn=2, **broken))
