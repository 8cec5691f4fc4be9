"""A sequence that decodes from the prefix cache alone may be longer than the rows that it joins."""

from __future__ import annotations

import torch

from miles_core.engines.embedded.kv_pool import LayerCache


def test_rows_grow_past_a_sequence_that_was_never_in_them():
    keys = torch.zeros(1, 2, 4)
    layer = LayerCache(keys, keys, slots=16, rows=2, capacity=3)
    layer.rows[0][0] = 7.0
    layer.grow_rows(8, [2, 6])  # row 1 holds a prefix of 6 tokens that is loaded in this very step
    assert layer.rows[0].shape == (2, 2, 8, 4)
    assert (layer.rows[0][0, :, :2] == 7.0).all()
