"""Loss and gradient are those of the batch: micro-batches, packing, order and padding do not change them. Process
counts are in test_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from invariance import branching, objective, padded, reordered, step

TOLERANCE = {"float64": 1e-6, "float32": 1e-5}
LAYOUTS = {
    "micro-batches of one trajectory": {"max_tokens_per_microbatch": 1},
    "small micro-batches": {"max_tokens_per_microbatch": 14},
    "nothing shared": {"share_prefix": False},
    "nothing shared, small": {"share_prefix": False, "max_tokens_per_microbatch": 20},
    "activations recomputed": {"activation_checkpointing": True},
}


@pytest.fixture(scope="module", params=["float64", "float32"])
def whole(request, backends):
    """One micro-batch of everything: by aggregation and ratio, loss and gradient."""
    backend = backends(dtype=request.param)
    found = {
        key: step(backend, branching(), objective(*key))
        for key in (("sequence", "token"), ("token", "sequence"), ("constant", "token"))
    }
    return request.param, backend, found


def same(mine, theirs, tolerance):
    # Terms of about 1 cancel in the loss: what is exact to `tolerance` is the terms.
    assert mine[0] == pytest.approx(theirs[0], rel=tolerance, abs=tolerance / 10)
    assert mine[1].keys() == theirs[1].keys()
    scale = max(float(g.abs().max()) for g in theirs[1].values())
    assert scale > 1e-4
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(mine[1][name], gradient, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(whole, backends, layout):
    dtype, _, found = whole
    backend = backends(dtype=dtype, **LAYOUTS[layout])
    for key, expected in found.items():
        same(step(backend, branching(), objective(*key)), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("change", [reordered, padded])
def test_order_and_padding_change_nothing(whole, change):
    dtype, backend, found = whole
    for key, expected in found.items():
        same(step(backend, change(branching()), objective(*key)), expected, TOLERANCE[dtype])


def test_a_difference_would_be_seen(whole):
    dtype, backend, found = whole
    key = ("sequence", "token")
    with pytest.raises(AssertionError):
        same(step(backend, branching(1), objective(*key)), found[key], TOLERANCE[dtype])
