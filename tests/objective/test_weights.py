"""Tokens that weigh less: exactly so much less, and the others no less for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from miles_core.contracts.objective import BatchColumns  # noqa: E402
from miles_core.data.group import Batch, Episode, Group, Prompt  # noqa: E402
from miles_core.data.parquet import read_rollouts, write_rollouts  # noqa: E402
from miles_core.data.trajectory import Status, Trajectory  # noqa: E402
from miles_core.objective.aggregation import Aggregation, token_weights  # noqa: E402
from miles_core.training.columns import batch_columns  # noqa: E402

WEIGHTS = [[1.0, 0.5, 0.25], [0.25, 0.25], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0]]


def columns(weights: list[list[float]] | None) -> BatchColumns:
    lengths = [len(w) for w in WEIGHTS]
    count = sum(lengths)
    return BatchColumns(
        offsets=torch.tensor([0, *np.cumsum(lengths)]),
        episode_of=torch.arange(4),
        group_of=torch.tensor([0, 0, 1, 1]),
        rewards=torch.zeros(4, dtype=torch.float64),
        truncated=torch.zeros(4, dtype=torch.bool),
        loss_mask=torch.ones(count, dtype=torch.bool),
        rollout_logprobs=torch.zeros(count),
        versions=torch.zeros(count, dtype=torch.int32),
        policy_version=0,
        weights=None if weights is None else torch.tensor([w for row in weights for w in row]),
    )


def reference(kind: Aggregation) -> list[float]:
    """Σ w·l / Σ w, written out."""
    total = sum(map(sum, WEIGHTS))
    training = sum(sum(row) > 0 for row in WEIGHTS)
    factors = []
    for row in WEIGHTS:
        below = {"token": total, "sequence": sum(row) * training, "constant": 10 * training}[kind]
        factors += [w / below if w else 0.0 for w in row]
    return factors


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_a_weight_counts_above_and_below_the_line(kind: Aggregation) -> None:
    found = token_weights(columns(WEIGHTS), kind, constant_length=10)
    assert found.tolist() == pytest.approx(reference(kind), abs=1e-15)


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_equal_weights_of_any_size_are_none(kind: Aggregation) -> None:
    small = [[0.125 for _ in row] for row in WEIGHTS]
    found = token_weights(columns(small), kind, constant_length=10)
    plain = token_weights(columns(None), kind, constant_length=10)
    assert (found * (8 if kind == "constant" else 1)).tolist() == pytest.approx(plain.tolist(), abs=1e-15)


def trajectory(weights: list[float] | None) -> Trajectory:
    return Trajectory(
        token_ids=np.array([1, 2, 3]),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0.0, -1.0, -1.0]),
        versions=np.array([-1, 0, 1]),
        prompt_id="p",
        group_id="g",
        episode_id=f"g.0/{weights is None:d}",
        trajectory_id=f"g.0/{weights is None:d}.0",
        reward=1.0,
        weights=None if weights is None else np.array(weights, np.float32),
    )


def test_weights_reach_the_columns_and_the_disk(tmp_path: Path) -> None:
    both = [trajectory([1.0, 0.25, 1.0]), trajectory(None)]
    episodes = tuple(
        Episode(episode_id=t.episode_id, prompt_id="p", group_id="g", status=Status.COMPLETED, trajectories=(t,))
        for t in both
    )
    group = Group(group_id="g", prompt=Prompt(prompt_id="p", messages=()), episodes=episodes)
    flat = batch_columns(Batch(groups=(group,), policy_version=1, step=1)).weights
    assert flat is not None
    assert flat.tolist() == [1.0, 0.25, 1.0, 1.0, 1.0, 1.0]
    write_rollouts(tmp_path / "r.parquet", both, step=2, policy_version=1)
    read = [t.weights for t in read_rollouts(tmp_path / "r.parquet")]
    assert [w.tolist() for w in read if w is not None] == [[1.0, 0.25, 1.0], [1.0, 1.0, 1.0]]
    write_rollouts(tmp_path / "s.parquet", both[1:], step=2, policy_version=1)
    assert [t.weights for t in read_rollouts(tmp_path / "s.parquet")] == [None]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, -0.5, 1.0], [1.0, float("nan"), 1.0], [1.0, 2.0, 1.0]])
def test_weights_outside_their_range_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="from 0 to 1 for each of 3 tokens"):
        trajectory(weights)
