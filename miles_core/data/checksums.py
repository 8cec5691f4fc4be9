"""Checksums of tensor bytes: xxh3-128, hexadecimal. Bytes, not values: −0.0 and 0.0 differ, NaN payloads too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TypeVar

import xxhash

__all__ = ["checksum", "over_threads"]

T = TypeVar("T")

_WORTH_A_THREAD = 4 << 20
"""Bytes that take longer to hash than a thread takes to start."""


def checksum(data: bytes | memoryview) -> str:
    """xxh3-128 of the bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def over_threads(work: Callable[[T], str], items: Sequence[T], sizes: Sequence[int], threads: int) -> list[str]:
    """`work` of each item, in order; each of up to `threads` threads takes a run of neighbours of about as many bytes
    (`sizes`, one an item) as the others. Hashing releases the interpreter's lock."""
    total = sum(sizes)
    threads = max(1, min(threads, len(items), total // _WORTH_A_THREAD))
    if threads == 1:
        return [work(item) for item in items]
    runs: list[list[T]] = [[] for _ in range(threads)]
    for item, end in zip(items, accumulate(sizes), strict=True):
        runs[min(threads - 1, (end - 1) * threads // total)].append(item)
    with ThreadPoolExecutor(threads) as pool:
        return [found for run in pool.map(lambda run: [work(item) for item in run], runs) for found in run]
