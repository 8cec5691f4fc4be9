"""A whole run that trains adapters: the engines serve them, step after step."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.runs.metrics import MetricsStore
from tests.runs.conftest import train


@pytest.mark.nightly
def test_what_is_sampled_is_what_the_adapters_compute_at_every_step(tmp_path: Path) -> None:
    """`tests/field/test_publishing.py` shows that weights of the start would differ after one step."""
    pytest.importorskip("peft")
    overrides = ["backend.lora.rank=4", "backend.learning_rate=0.02", "evaluation.every=0"]
    store = MetricsStore(train(tmp_path, "adapters", *overrides) / "metrics.sqlite")
    try:
        moved = dict(store.series("train", "grad_norm"))
        apart = dict(store.series("train", "fidelity/abs_difference_max"))
    finally:
        store.close()
    assert set(moved) == set(apart) == {1, 2, 3, 4}
    assert min(moved.values()) > 0
    assert max(apart.values()) < 1e-5
