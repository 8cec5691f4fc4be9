"""Where a prompt of token ids attaches: turns that were asked for in tokens are matched by what they hold."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from miles_core.tito.tree import Digests, Node, SessionTree

__all__ = ["TOKENS", "digest_of_ids", "prompt_digests"]

TOKENS = b"token ids"
"""The identity of the root of such turns: they never meet turns of messages, whose roots are named by their tools."""


def digest_of_ids(ids: NDArray[np.int32]) -> bytes:
    """Of what a turn adds, prompt and reply apart: to the tree they are two messages."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(ids).tobytes())


def prompt_digests(tree: SessionTree, ids: NDArray[np.int32]) -> Digests:
    """Digests for `SessionTree.plan`: those of the longest path that `ids` begins with, the newest of equals, and one
    of the ids behind it. Costs a comparison of ids a node of the path, and one a sibling."""
    root = tree.match(TOKENS, ())
    best = root
    path: Digests = ()
    waiting: list[tuple[Node, Digests]] = [] if root is None else [(root, ())]
    while waiting:
        node, digests = waiting.pop()
        if best is None or (node.length, node.order) > (best.length, best.order):
            best, path = node, digests
        waiting.extend((c, (*digests, *c.digests)) for c in node.children if _repeats(ids, c))
    return *path, digest_of_ids(ids[0 if best is None else best.length :])


def _repeats(ids: NDArray[np.int32], node: Node) -> bool:
    assert node.added is not None
    return np.array_equal(ids[node.length - len(node.added.ids) : node.length], node.added.ids)
