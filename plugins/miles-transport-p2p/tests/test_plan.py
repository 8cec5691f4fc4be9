"""The transfer plan against the words of its definition."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_transport_p2p.plan import assign


def test_one_to_one_first():
    everything = ["x", "y"]
    plan = assign({"x": 1, "y": 1}, {"s0": everything, "s1": everything}, {"t0": everything, "t1": everything})
    assert {a.target: a.source for a in plan} == {"t0": "s0", "t1": "s1"}


def test_then_the_least_loaded_that_holds_it():
    holders = {"s0": ["x"], "s1": ["x"]}
    plan = assign({"x": 5}, holders, {f"t{i}": ["x"] for i in range(6)})
    assert Counter(a.source for a in plan) == {"s0": 3, "s1": 3}


def test_a_shard_that_nobody_holds_is_named():
    with pytest.raises(ValueError, match="t needs z"):
        assign({"z": 1}, {"s": []}, {"t": ["z"]})


shards = st.lists(st.sampled_from("abcd"), unique=True, min_size=1)


@given(st.lists(shards, min_size=1, max_size=4), st.lists(shards, min_size=1, max_size=6))
def test_every_shard_arrives_once_from_one_who_holds_it(held, wanted):
    holders = {f"s{i}": s for i, s in enumerate(held)} | {"all": list("abcd")}
    targets = {f"t{i}": s for i, s in enumerate(wanted)}
    plan = assign(dict.fromkeys("abcd", 3), holders, targets)
    assert [(a.target, a.shard) for a in plan] == [(t, s) for t, ss in targets.items() for s in ss]
    assert all(a.shard in holders[a.source] for a in plan)
