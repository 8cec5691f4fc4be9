"""Advantage estimators against plain-Python references, and their degenerate cases."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from miles_core.objective.grpo import Grpo, GrpoConfig, group_advantages
from miles_core.objective.ppo import Ppo, PpoConfig
from miles_core.objective.reinforce_pp import (
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReinforcePlusPlusConfig,
)

rewards_and_groups = st.lists(
    st.tuples(st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(-5, 5)), st.integers(0, 4)), min_size=2, max_size=24
)


@given(rewards_and_groups, st.sampled_from(["group", "none", "batch"]), st.booleans())
def test_group_advantages_are_the_definition(slow, pairs, scale, leave_one_out):
    rewards, groups = (list(x) for x in zip(*pairs, strict=True))
    ours, _ = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), scale=scale, leave_one_out=leave_one_out
    )
    assert ours.tolist() == pytest.approx(slow.grpo(rewards, groups, scale, leave_one_out), rel=1e-8, abs=1e-8)


@given(rewards_and_groups, st.randoms())
def test_groups_are_found_by_id_and_not_by_position(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    tensors = [torch.tensor([r for r, _ in pairs], dtype=torch.float64), torch.tensor([g for _, g in pairs])]
    straight, _ = group_advantages(*tensors)
    shuffled, _ = group_advantages(*(x[order] for x in tensors))
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-9, atol=1e-9)


def test_uneven_groups_have_their_own_means():
    rewards = torch.tensor([1.0, 2, 3, 4, 10, 12, 5, 6, 7], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    ours, _ = group_advantages(rewards, groups, scale="none")
    assert ours.tolist() == [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]


@pytest.mark.parametrize("rewards", [[0.95] * 8, [0.5] * 8, [0.1 + 0.2, 0.3, 0.3], [0.0] * 4, [7.0], [5.0, 5.0 + 1e-9]])
@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_float_noise_is_no_signal(rewards, scale):
    others = [0.0] + [0.95] * 7
    ours, metrics = group_advantages(
        torch.tensor(rewards + others, dtype=torch.float64),
        torch.tensor([0] * len(rewards) + [1] * len(others)),
        scale=scale,
    )
    assert ours[: len(rewards)].tolist() == [0.0] * len(rewards)
    assert metrics["advantage/flat_groups"] == 1
    assert 0.1 < float(ours.abs().max()) < 4


def test_an_infinite_reward_is_not_taken_for_equal_rewards():
    ours, _ = group_advantages(torch.tensor([math.inf, 0.0], dtype=torch.float64), torch.tensor([0, 0]))
    assert not bool(ours.isfinite().all())


def test_small_but_real_differences_are_signal():
    ours, _ = group_advantages(torch.tensor([1e-7, 2e-7], dtype=torch.float64), torch.tensor([0, 0]), scale="none")
    assert ours.tolist() == pytest.approx([-5e-8, 5e-8])


@given(st.integers(0, 200))
def test_grpo_gives_an_episode_one_advantage(slow, seed):
    columns = slow.make_columns(seed)
    ours = Grpo(GrpoConfig()).estimate(columns).advantages
    per_episode = slow.grpo(columns.rewards.tolist(), columns.group_of.tolist())
    expected = torch.zeros(len(ours))
    for episode, tokens in slow.trajectories(columns):
        expected[tokens] = per_episode[episode]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 200), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.3]))
def test_reinforce_pp_is_the_definition(slow, seed, gamma, beta):
    columns = slow.make_columns(seed)
    estimator = ReinforcePlusPlus(ReinforcePlusPlusConfig(gamma=gamma, kl_coefficient=beta))
    raw = {}
    for episode, tokens in slow.trajectories(columns):
        following = 0.0
        for t in reversed(tokens):
            reward = columns.rewards[episode].item() if t == tokens[-1] else 0.0
            reward -= beta * (columns.old_logprobs[t] - columns.reference_logprobs[t]).item()
            following = raw[t] = reward + gamma * following
    check_whitened(slow, estimator.estimate(columns).advantages, raw)


@given(st.integers(0, 200), st.sampled_from([0.0, 0.3]))
def test_reinforce_pp_baseline_is_the_definition(slow, seed, beta):
    columns = slow.make_columns(seed)
    centred = slow.grpo(columns.rewards.tolist(), columns.group_of.tolist(), scale="none")
    raw = {
        t: centred[episode] - beta * (columns.old_logprobs[t] - columns.reference_logprobs[t]).item()
        for episode, tokens in slow.trajectories(columns)
        for t in tokens
    }
    estimator = ReinforcePlusPlusBaseline(ReinforcePlusPlusConfig(kl_coefficient=beta))
    check_whitened(slow, estimator.estimate(columns).advantages, raw)


def check_whitened(slow, ours, raw):
    expected = torch.zeros(len(ours))
    for t, value in zip(raw, slow.whiten(list(raw.values())), strict=True):
        expected[t] = value
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 200), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_the_definition_over_trainable_tokens(slow, seed, gamma, lam):
    columns = slow.make_columns(seed)
    ours = Ppo(PpoConfig(**{"gamma": gamma, "lambda": lam, "whiten": False})).estimate(columns)
    truncated = columns.truncated.tolist()
    expected = torch.zeros(len(ours.advantages))
    returns = torch.zeros(len(ours.advantages))
    for s, (episode, tokens) in enumerate(slow.trajectories(columns)):
        advantage, after = 0.0, None
        for t in reversed(tokens):
            value = columns.values[t].item()
            reward = 0.0
            if after is None:
                reward, after = columns.rewards[episode].item(), (value if truncated[s] else 0.0)
            advantage = reward + gamma * after - value + gamma * lam * advantage
            after = value
            expected[t], returns[t] = advantage, advantage + value
    torch.testing.assert_close(ours.advantages, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.returns, returns, rtol=1e-5, atol=1e-5)


def test_masked_spans_do_not_decay(slow):
    dense = slow.plain_columns([1.0], [0], masks=[[True, True]])
    holes = slow.plain_columns([1.0], [0], masks=[[False, True, False, False, True, False]])
    config = ReinforcePlusPlusConfig(gamma=0.5)
    ours = ReinforcePlusPlus(config).estimate(holes).advantages
    assert ours[[1, 4]].tolist() == ReinforcePlusPlus(config).estimate(dense).advantages.tolist()


ESTIMATORS = [
    Grpo(GrpoConfig()),
    Grpo(GrpoConfig(leave_one_out=True, scale="batch")),
    ReinforcePlusPlus(ReinforcePlusPlusConfig(kl_coefficient=0.1)),
    ReinforcePlusPlusBaseline(ReinforcePlusPlusConfig(kl_coefficient=0.1)),
    Ppo(PpoConfig()),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "masks",
    [[[]], [[False]], [[True]], [[False, False], []], [[True], [False, False]], [[True, True], [], [False, True]]],
    ids=str,
)
def test_degenerate_batches_are_finite(slow, estimator, masks):
    columns = slow.plain_columns([1.0] * len(masks), [0] * len(masks), masks=masks)
    zeros = torch.zeros(len(columns.loss_mask))
    columns = slow.make_columns(0).__class__(
        **{
            **{name: getattr(columns, name) for name in columns.__dataclass_fields__},
            "old_logprobs": zeros,
            "reference_logprobs": zeros,
            "values": zeros,
        }
    )
    result = estimator.estimate(columns)
    assert bool(result.advantages.isfinite().all())
    assert bool((result.advantages[~columns.loss_mask] == 0).all())
    assert all(math.isfinite(v) for v in result.metrics.values())


def test_a_penalty_without_a_coefficient_is_refused():
    with pytest.raises(ValidationError, match="no effect"):
        ReinforcePlusPlusConfig(kl_estimator="k2")
