"""The token ids of the paths that sessions are on: a walk over all turns of a long session costs as much as the rest of
its next turn."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from miles_core.tito.tree import Node

__all__ = ["RecentPaths"]


class RecentPaths:
    """Of each session the path to its last turn, as long as those of the sessions used last fit into `max_bytes`."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._room = max_bytes
        self._held: OrderedDict[str, tuple[Node, NDArray[np.int32], NDArray[np.int32]]] = OrderedDict()

    def ids(self, session: str, node: Node, drop: int, more: NDArray[np.int32]) -> NDArray[np.int32]:
        """`node.ids(drop)`, and `more` behind it. int32 [length − drop + len(more)]."""
        held = self._held.get(session)
        if held is None or held[0] is not node or drop > len(held[2]):
            return np.concatenate([node.ids(drop), more])
        _, prompt, sampled = held
        return np.concatenate([prompt, sampled[: len(sampled) - drop], more])

    def keep(self, session: str, node: Node, prompt: NDArray[np.int32], sampled: NDArray[np.int32]) -> None:
        """The path of `node` is `prompt`, then `sampled`."""
        self.forget(session)
        self._held[session] = (node, prompt, sampled)
        self._room -= prompt.nbytes + sampled.nbytes
        while self._room < 0:
            self.forget(next(iter(self._held)))

    def forget(self, session: str) -> None:
        held = self._held.pop(session, None)
        if held is not None:
            self._room += held[1].nbytes + held[2].nbytes
