"""Checksums over threads are those of one thread, in order."""

from __future__ import annotations

import threading

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.checksums import checksum, over_threads


@given(st.lists(st.integers(0, 9 << 20), max_size=12), st.integers(1, 5))
def test_every_item_has_its_own_in_order(sizes: list[int], threads: int) -> None:
    names = [f"{index}: {size}" for index, size in enumerate(sizes)]
    assert over_threads(lambda name: name, names, sizes, threads) == names


def test_each_thread_takes_about_as_many_bytes() -> None:
    seen: dict[int, int] = {}
    both = threading.Barrier(2)

    def work(size: int) -> str:
        if threading.get_ident() not in seen:
            both.wait(10.0)
        seen[threading.get_ident()] = seen.get(threading.get_ident(), 0) + size
        return checksum(bytes(size))

    sizes = [8 << 20, 1000, 0, 4 << 20, 4 << 20]
    found = over_threads(work, sizes, sizes, 2)
    assert found == [xxhash.xxh3_128_hexdigest(bytes(size)) for size in sizes]
    assert sorted(seen.values()) == [8 << 20, (8 << 20) + 1000]
