"""The order is a permutation each epoch, random access, and a pure function of its three arguments."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.rollout.order import PromptOrder, permute


@settings(max_examples=200, deadline=None)
@given(length=st.integers(1, 300), key=st.integers(0, 2**31 - 1))
def test_permute_is_a_permutation(length: int, key: int):
    assert sorted(permute(i, length, key) for i in range(length)) == list(range(length))


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 60), seed=st.integers(0, 2**31 - 1), shuffle=st.booleans(), batch=st.integers(1, 70))
def test_every_row_once_an_epoch_and_the_remainder_is_carried_on(length: int, seed: int, shuffle: bool, batch: int):
    """Issued in batches that do not divide the epoch: nothing is skipped, nothing comes twice."""
    order = PromptOrder(length, seed, shuffle)
    issued = [order.row(step * batch + i) for step in range(3 * length // batch + 1) for i in range(batch)]
    for epoch in range(len(issued) // length):
        rows = issued[epoch * length : (epoch + 1) * length]
        assert {e for e, _ in rows} == {epoch}
        assert sorted(row for _, row in rows) == list(range(length))


@given(length=st.integers(1, 10**12), seed=st.integers(0, 2**31 - 1), k=st.integers(0, 10**15))
def test_row_is_pure_and_needs_no_table(length: int, seed: int, k: int):
    epoch, row = PromptOrder(length, seed).row(k)
    assert (epoch, row) == PromptOrder(length, seed).row(k)
    assert epoch == k // length
    assert 0 <= row < length


def test_epochs_and_seeds_differ():
    orders = {tuple(PromptOrder(50, seed).row(e * 50 + i)[1] for i in range(50)) for seed in range(5) for e in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("length", [2, 3, 5, 7, 16])
def test_every_place_is_as_likely_as_any_other(length: int):
    """Over many keys each row stands first (and last) about equally often: within 5 standard errors."""
    keys = 4000
    for place in (0, length - 1):
        counts = Counter(permute(place, length, key) for key in range(keys))
        expected = keys / length
        error = (expected * (1 - 1 / length)) ** 0.5
        assert all(abs(counts[row] - expected) < 5 * error for row in range(length))


def test_all_orders_of_three_occur_about_equally():
    counts = Counter(tuple(permute(i, 3, key) for i in range(3)) for key in range(6000))
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * (1000 * 5 / 6) ** 0.5 for count in counts.values())


def test_without_shuffle_in_file_order():
    assert [PromptOrder(2, 0, False).row(k) for k in range(3)] == [(0, 0), (0, 1), (1, 0)]


def test_what_has_no_order():
    with pytest.raises(ValueError, match="the data source is empty"):
        PromptOrder(0, 0)
    with pytest.raises(IndexError):
        PromptOrder(3, 0).row(-1)
    with pytest.raises(IndexError):
        permute(3, 3, 0)
