"""The radix tree against the obvious: a list of every sequence that was ever inserted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_core.engines.embedded.prefix_cache import PrefixCache, SlotAllocator

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def insert(cache: PrefixCache, slots: SlotAllocator, ids: list[int]) -> np.ndarray | None:
    """Insert as the scheduler does; return the slots of ``ids``, None when there was no room."""
    matched, node = cache.match(array(ids))
    cache.lock(node)
    need = len(ids) - len(matched)
    if slots.free + cache.evictable < need:
        cache.unlock(node)
        return None
    if slots.free < need:
        cache.evict(need - slots.free)
    mine = np.concatenate([matched, slots.take(need)])
    present = cache.insert(array(ids), mine)
    assert present == len(matched)
    cache.unlock(node)
    return mine


@given(st.lists(tokens, max_size=12), tokens)
def test_match_is_the_longest_common_prefix_and_its_slots(inserted: list[list[int]], asked: list[int]) -> None:
    slots = SlotAllocator(200)
    cache = PrefixCache(slots)
    written: dict[int, int] = {}
    for ids in inserted:
        mine = insert(cache, slots, ids)
        assert mine is not None
        for slot, token in zip(mine.tolist(), ids, strict=True):
            assert written.setdefault(slot, token) == token
    matched, _ = cache.match(array(asked))
    common = [sum(np.cumprod([a == b for a, b in zip(ids, asked, strict=False)])) for ids in inserted]
    assert len(matched) == max(common, default=0)
    assert [written[slot] for slot in matched.tolist()] == asked[: len(matched)]


@given(st.lists(st.tuples(tokens, st.booleans(), st.booleans()), max_size=20))
def test_no_slot_is_lost_or_held_twice(operations: list[tuple[list[int], bool, bool]]) -> None:
    slots = SlotAllocator(16)
    cache = PrefixCache(slots)
    locked = []
    for ids, lock, detach in operations:
        if insert(cache, slots, ids) is not None and lock:
            matched, node = cache.match(array(ids))
            cache.lock(node)
            locked.append((node, matched.tolist()))
        if detach:
            cache.detach()
            assert len(cache.match(array(ids))[0]) == 0
        free = set(slots._free[: slots.free].tolist())
        assert len(free) == slots.free
        assert not free & {slot for _, held in locked for slot in held}
    for node, _ in locked:
        cache.unlock(node)
    assert slots.free + cache.evictable == slots.capacity
    cache.evict(slots.capacity)
    assert slots.free == slots.capacity
    assert cache.evictable == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    slots = SlotAllocator(6)
    cache = PrefixCache(slots)
    for ids in ([1, 1], [2, 2], [3, 3]):
        insert(cache, slots, ids)
    cache.match(array([1, 1]))
    cache.evict(2)
    assert [len(cache.match(array(ids))[0]) for ids in ([1, 1], [2, 2], [3, 3])] == [2, 0, 2]
