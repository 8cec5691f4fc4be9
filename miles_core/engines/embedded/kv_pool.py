"""The tensors behind the slots.

Two views of the same keys and values, per layer:

- the *pool* [slots, heads, dim] is the truth: any sequence's prefix is a list of slots, and prefixes are shared;
- the *rows* [rows, heads, capacity, dim] hold each decoding sequence once more, dense, so that a decode step
  reads a plain strided batch and gathers nothing. A sequence is copied into its row once, when its prompt ends.

Rows grow by doubling to the longest sequence that decodes. On a CPU memory is only backed where it was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROW_STEP = 256


class LayerCache:
    """Keys and values of one attention layer."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, *, slots: int, rows: int, capacity: int) -> None:
        self.pool = [tensor.new_empty(slots, *tensor.shape[1:]) for tensor in (keys, values)]
        self.rows = [_zeros(tensor, (rows, tensor.shape[1], capacity, tensor.shape[2])) for tensor in (keys, values)]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens in the pool."""
        self.pool[0].index_copy_(0, slots, keys)
        self.pool[1].index_copy_(0, slots, values)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [1, heads, tokens, dim] of one sequence."""
        key, value = (pool.index_select(0, slots).transpose(0, 1).unsqueeze(0) for pool in self.pool)
        return key, value

    def load_rows(self, fresh: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy sequences from the pool into their rows. Sequences of one length are copied together, as those of a
        group that shares its prompt are."""
        by_length: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for row, slots in fresh:
            by_length.setdefault(len(slots), []).append((row, slots))
        for length, group in by_length.items():
            where = torch.tensor([row for row, _ in group], device=self.pool[0].device)
            slots = torch.cat([slots for _, slots in group])
            for rows, pool in zip(self.rows, self.pool, strict=True):
                taken = pool.index_select(0, slots).view(len(group), length, *pool.shape[1:])
                rows[where, :, :length] = taken.transpose(1, 2)

    def append(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the next token of rows 0 to B - 1 at ``positions`` [B]."""
        order = torch.arange(len(positions), device=positions.device)
        self.rows[0][order, :, positions] = keys
        self.rows[1][order, :, positions] = values

    def move_row(self, source: int, target: int, tokens: int) -> None:
        """Copy a row's first ``tokens`` tokens."""
        for rows in self.rows:
            rows[target, :, :tokens] = rows[source, :, :tokens]

    def grow_rows(self, capacity: int, lengths: Sequence[int]) -> None:
        """Make room for ``capacity`` tokens a row; row i keeps its first ``lengths[i]``. A sequence that decodes from
        the prefix cache alone counts here before it is loaded, and may be longer than the rows that are left behind."""
        for index, old in enumerate(self.rows):
            new = _zeros(old, (old.shape[0], old.shape[1], capacity, old.shape[3]))
            for row, length in enumerate(lengths):
                kept = min(length, old.shape[2])
                new[row, :, :kept] = old[row, :, :kept]
            self.rows[index] = new


def _zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros; on a CPU from calloc, which takes no memory before it is written (torch's zeros do)."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    nbytes = int(np.prod(shape)) * like.element_size()
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(like.dtype).view(shape)


class KVPool:
    """All layers. A layer's tensors are made when it first writes, with the shapes that it writes."""

    def __init__(self, *, slots: int, rows: int) -> None:
        self._slots = slots
        self._row_count = rows
        self._capacity = _ROW_STEP
        self._layers: dict[int, LayerCache] = {}

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
        """Return a layer's cache."""
        layer = self._layers.get(index)
        if layer is None:
            layer = self._layers[index] = LayerCache(
                keys, values, slots=self._slots, rows=self._row_count, capacity=self._capacity
            )
        return layer

    def prepare(self, moves: Sequence[tuple[int, int, int]], lengths: Sequence[int], longest: int) -> None:
        """Before a step: close holes between rows, and make room for ``longest`` tokens a row.

        ``lengths`` are the tokens that rows 0, 1, … hold after the moves.
        """
        for layer in self._layers.values():
            for source, target, tokens in moves:
                layer.move_row(source, target, tokens)
        if longest > self._capacity:
            wanted = max(longest, 2 * self._capacity)
            self._capacity = -(-wanted // _ROW_STEP) * _ROW_STEP
            for layer in self._layers.values():
                layer.grow_rows(self._capacity, lengths)
