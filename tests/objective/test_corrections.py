"""Corrections against loops over lists, and what they report."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from miles_core.objective.clip_or_pop import ClipOrPop, ClipOrPopConfig
from miles_core.objective.mis import Mis, MisConfig
from miles_core.objective.opsm import Opsm, OpsmConfig
from miles_core.objective.tis import Tis, TisConfig

seeds = st.integers(0, 200)


def log_ratios(columns):
    return (columns.old_logprobs.double() - columns.rollout_logprobs.double()).tolist()


def masked(columns, values):
    return [v for v, m in zip(values, columns.loss_mask.tolist(), strict=True) if m]


@given(seeds, st.sampled_from([(0.0, 2.0), (0.5, 1.5)]))
def test_tis_clamps_the_ratio(slow, seed, bounds):
    columns = slow.make_columns(seed)
    result = Tis(TisConfig(low=bounds[0], high=bounds[1])).correct(columns, torch.zeros(1))
    expected = [min(max(math.exp(d), bounds[0]), bounds[1]) for d in log_ratios(columns)]
    kept = masked(columns, expected)
    assert masked(columns, result.weights.tolist()) == pytest.approx(kept, rel=1e-5)
    high = [math.exp(d) > bounds[1] for d in masked(columns, log_ratios(columns))]
    assert result.metrics["truncated_high"] == pytest.approx(sum(high) / max(len(high), 1))


@given(seeds)
def test_clip_or_pop_zeroes_a_token_outside(slow, seed):
    columns = slow.make_columns(seed)
    result = ClipOrPop(ClipOrPopConfig(low=0.5, high=2.0)).correct(columns, torch.zeros(1))
    expected = [r if 0.5 <= r <= 2.0 else 0.0 for r in map(math.exp, masked(columns, log_ratios(columns)))]
    assert masked(columns, result.weights.tolist()) == pytest.approx(expected, rel=1e-5)
    assert result.metrics["popped"] == pytest.approx(expected.count(0.0) / max(len(expected), 1))


@given(
    seeds, st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from(["truncate", "clip", "mask"]),
    st.sampled_from([None, 0.3]),
)  # fmt: skip
def test_mis_by_level_and_mode(slow, seed, level, mode, veto):
    columns = slow.make_columns(seed)
    result = Mis(MisConfig(level=level, mode=mode, veto=veto)).correct(columns, torch.zeros(1))
    differences = log_ratios(columns)
    vetoed = 0
    for _, tokens in slow.trajectories(columns):
        dropped = veto is not None and any(math.exp(differences[t]) < veto for t in tokens)
        vetoed += dropped
        total = math.fsum(differences[t] for t in tokens)
        for t in tokens:
            ratio = math.exp({"token": differences[t], "sequence": total, "geometric": total / len(tokens)}[level])
            weight = {
                "truncate": min(ratio, 2.0),
                "clip": min(max(ratio, 0.5), 2.0),
                "mask": ratio if 0.5 <= ratio <= 2.0 else 0.0,
            }[mode]
            assert result.weights[t].item() == pytest.approx(0.0 if dropped else weight, rel=1e-4)
    assert result.metrics.get("vetoed_trajectories", 0) == vetoed


def test_opsm_masks_a_sequence_and_not_a_token(slow):
    """Log-probs 0, old 1, advantages of both signs: the sequence goes as a whole."""
    columns = slow.plain_columns([0.0], [0], lengths=[3], logprobs=[1.0] * 3, old=[0.0] * 3)
    result = Opsm(OpsmConfig(delta=0.1)).correct(columns, torch.tensor([-0.5, 0.25, -0.25]))
    assert result.weights.tolist() == [0.0, 0.0, 0.0]
    assert result.metrics == {"masked_trajectories": 1.0}


@given(seeds)
def test_opsm_is_the_definition(slow, seed):
    columns = slow.make_columns(seed)
    advantages = torch.linspace(-1, 0.5, len(columns.loss_mask))
    weights = Opsm(OpsmConfig(delta=0.1)).correct(columns, advantages).weights
    differences = log_ratios(columns)
    for _, tokens in slow.trajectories(columns):
        drift = -math.fsum(differences[t] for t in tokens) / max(len(tokens), 1)
        sign = math.fsum(advantages[t].item() for t in tokens)
        for t in tokens:
            assert weights[t].item() == (0.0 if sign < 0 and drift > 0.1 else 1.0)


@pytest.mark.parametrize(
    "correction", [Tis(TisConfig()), ClipOrPop(ClipOrPopConfig()), Mis(MisConfig()), Opsm(OpsmConfig())]
)
def test_equal_logprobs_change_nothing(slow, correction):
    columns = slow.make_columns(1)
    columns = dataclasses.replace(columns, old_logprobs=columns.rollout_logprobs)
    weights = correction.correct(columns, -torch.ones(len(columns.loss_mask))).weights
    assert bool((weights[columns.loss_mask] == 1).all())


@pytest.mark.parametrize(
    "correction",
    [Tis(TisConfig()), ClipOrPop(ClipOrPopConfig()), Mis(MisConfig(veto=0.1, level="geometric")), Opsm(OpsmConfig())],
)
def test_nothing_trainable_is_finite(slow, correction):
    columns = slow.plain_columns([0.0, 1.0], [0, 0], masks=[[False, False], []], old=[-1.0, -1.0])
    result = correction.correct(columns, torch.zeros(2))
    assert bool(result.weights.isfinite().all())
    assert all(math.isfinite(v) for v in result.metrics.values())


@pytest.mark.parametrize("config", [TisConfig, ClipOrPopConfig, MisConfig])
def test_bounds_out_of_order_are_refused(config):
    with pytest.raises(ValidationError, match="above high"):
        config(low=3.0, high=2.0)
