"""Routed experts of a turn: the rows that its path lacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.engines import Generation
from miles_core.errors import EngineError
from miles_core.tito.tree import Node

__all__ = ["new_routes"]


def new_routes(parent: Node, drop: int, added: int, generations: Sequence[Generation]) -> NDArray[np.int32] | None:
    """The routed-experts rows that the parent's path lacks; rows that an earlier turn recorded stay as they are.

    Row i routed the position that predicts token i+1. Raises `EngineError` for a missing row: none is padded.
    """
    if all(g.routed_experts is None or not len(g.token_ids) for g in generations):
        return None
    base = parent.length - drop
    held = sum(0 if n.added is None or n.added.routes is None else len(n.added.routes) for n in parent.path())
    covered = min(held, max(base - 1, 0))
    pieces: list[NDArray[np.int32]] = []
    end = base + added
    for generation in generations:
        end += len(generation.token_ids)
        if not len(generation.token_ids):
            continue
        rows = generation.routed_experts
        first = generation.routed_start
        if rows is None or first > covered or first + len(rows) != end - 1:
            found = "none" if rows is None else f"{first} up to {first + len(rows)}"
            raise EngineError(
                f"{generation.engine}: routed-experts rows {covered} up to {end - 1} are needed, came {found}"
            )
        pieces.append(rows[covered - first :])
        covered = end - 1
    return np.concatenate(pieces)
