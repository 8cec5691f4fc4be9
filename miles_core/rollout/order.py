"""The order of prompts: a pure function of (seed, epoch, index), with random access.

A run that resumes needs no iterator state: the k-th prompt ever issued is `row(k)`. Epochs follow each other without
a gap, so that the remainder of an epoch that does not fill a batch is carried on.
"""

from __future__ import annotations

import dataclasses

from miles_core.data.seeds import derive_seed

__all__ = ["PromptOrder", "permute"]

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def permute(index: int, length: int, key: int) -> int:
    """Where the pseudo-random permutation `key` of `length` items sends `index`: O(1) memory, no table.

    A Feistel network over the next even number of bits, walked until it falls below `length` (cycle walking; Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The domain is below 4 × `length`, so a walk takes less
    than four steps on average.
    """
    if not 0 <= index < length:
        raise IndexError(f"index {index} is outside 0 to {length - 1}")
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(key, number, right) & mask)
        index = left << half | right
        if index < length:
            return index


def _mix(key: int, number: int, value: int) -> int:
    """A well-mixed 64-bit hash of the arguments (the finaliser of SplitMix64, Steele et al. 2014)."""
    z = (key + value * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) & _MASK64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK64
    return z ^ z >> 31


@dataclasses.dataclass(frozen=True, slots=True)
class PromptOrder:
    """Which row the k-th issued prompt is. `length` rows an epoch; without `shuffle` in file order."""

    length: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a prompt order needs at least one row, got {self.length}: the data source is empty")

    def row(self, k: int) -> tuple[int, int]:
        """(epoch, row index) of the k-th prompt, k from 0."""
        epoch, index = divmod(k, self.length)
        if epoch < 0:
            raise IndexError(f"prompt {k} is before the first")
        if not self.shuffle:
            return epoch, index
        return epoch, permute(index, self.length, derive_seed(self.seed, "order", epoch))
