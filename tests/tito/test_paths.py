"""What is held of paths is what the tree says, and never more than there is room for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_core.tito.paths import RecentPaths
from miles_core.tito.tree import Added, Node

NONE = np.zeros(0, np.int32)


def grown(lengths: list[tuple[int, int]]) -> list[Node]:
    """A line of turns that add so many ids, so many of them sampled."""
    nodes = [Node(None, (), None, 0)]
    for number, (prompt, sampled) in enumerate(lengths):
        added = Added(
            turn_id="t",
            drop=0,
            ids=np.arange(prompt + sampled, dtype=np.int32) + 1000 * number,
            sampled=prompt,
            logprobs=np.zeros(sampled, np.float32),
            versions=(),
            finish_reason="stop",
            parts=(),
            messages=b"[]",
        )
        nodes.append(Node(nodes[-1], (b"x",), added, number + 1))
    return nodes


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 12))
def test_ids_are_those_of_the_tree(lengths, drop):
    nodes = grown(lengths)
    last = nodes[-1]
    assert last.added is not None
    drop = min(drop, len(last.added.ids))
    sampled = last.added.ids[last.added.sampled :]
    paths, more = RecentPaths(), np.array([7, 8], np.int32)
    paths.keep("s", last, last.ids()[: last.length - len(sampled)], sampled)
    for node in nodes:
        for session in ("s", "another"):
            dropped = drop if node is last else 0
            expected = [*node.ids(dropped).tolist(), 7, 8]
            found = paths.ids(session, node, dropped, more)
            assert found.tolist() == expected
            assert found.dtype == np.int32


def test_the_paths_used_last_stay_and_no_more_than_fit():
    (_, node), ids = grown([(1, 1)]), np.zeros(100, np.int32)
    paths = RecentPaths(max_bytes=1000)
    for session in ("a", "b", "a", "c"):
        paths.keep(session, node, ids, NONE)
    assert list(paths._held) == ["a", "c"]
    paths.forget("a")
    paths.forget("a")
    paths.keep("d", node, ids, NONE)
    assert list(paths._held) == ["c", "d"]
    paths.keep("e", node, np.zeros(1000, np.int32), NONE)
    assert not paths._held
    assert paths._room == 1000
