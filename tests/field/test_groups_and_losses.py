"""Kinds of faults in rewards, advantages and losses that users of comparable systems met: the right values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from miles_core.contracts.component import ComponentConfig  # noqa: E402
from miles_core.contracts.objective import BatchColumns  # noqa: E402
from miles_core.data.group import Group, Prompt  # noqa: E402
from miles_core.objective.aggregation import token_weights  # noqa: E402
from miles_core.objective.compose import WeightedTerm, compose  # noqa: E402
from miles_core.objective.grpo import Grpo, GrpoConfig, group_advantages  # noqa: E402
from miles_core.objective.opsm import Opsm, OpsmConfig  # noqa: E402
from miles_core.objective.policy import Policy  # noqa: E402
from miles_core.objective.supervised import Supervised  # noqa: E402
from miles_core.rollout.filters import NonzeroStd  # noqa: E402


def columns(lengths: list[int], masks: list[bool], **fields: object) -> BatchColumns:
    """One trajectory an episode, one group, unless told otherwise."""
    count, tokens = len(lengths), sum(lengths)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    defaults: dict[str, object] = {
        "offsets": offsets,
        "episode_of": torch.arange(count),
        "group_of": torch.zeros(count, dtype=torch.int64),
        "rewards": torch.zeros(count, dtype=torch.float64),
        "truncated": torch.zeros(count, dtype=torch.bool),
        "loss_mask": torch.tensor(masks),
        "rollout_logprobs": torch.full((tokens,), -0.5),
        "versions": torch.zeros(tokens, dtype=torch.int32),
        "policy_version": 0,
    }
    return BatchColumns(**{**defaults, **fields})  # type: ignore[arg-type]


def test_groups_of_uneven_size_have_their_own_means() -> None:
    rewards = torch.tensor([1.0, 2, 3, 4, 10, 12, 5, 6, 7])
    group_of = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    advantages, _ = group_advantages(rewards, group_of, scale="none")
    assert advantages.tolist() == [-1.5, -0.5, 0.5, 1.5, -1.0, 1.0, -1.0, 0.0, 1.0]


def test_an_episode_that_is_missing_shifts_nobody_elses_group() -> None:
    rewards = torch.tensor([1.0, 3.0, 5.0, 9.0])
    group_of = torch.tensor([0, 0, 1, 1])
    whole, _ = group_advantages(rewards, group_of, scale="none")
    without, _ = group_advantages(rewards[1:], group_of[1:], scale="none")
    assert without.tolist() == [0.0, *whole[2:].tolist()]


def test_a_sequence_is_masked_as_a_whole() -> None:
    batch = columns([3], [True] * 3, old_logprobs=torch.full((3,), -1.0), rollout_logprobs=torch.zeros(3))
    corrected = Opsm(OpsmConfig(delta=0.1)).correct(batch, torch.tensor([-0.5, 0.25, -0.25]))
    assert corrected.weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rewards", [[0.95] * 8, [1e6 + 0.01] * 8, [-0.3] * 3])
def test_float_noise_is_no_signal(rewards: list[float]) -> None:
    single = torch.tensor(rewards, dtype=torch.float32).double() + torch.linspace(0, 1e-8, len(rewards)).double()
    advantages, _ = group_advantages(single, torch.zeros(len(rewards), dtype=torch.int64))
    assert advantages.abs().max() == 0


def test_one_real_difference_in_a_group_is_signal() -> None:
    advantages, _ = group_advantages(torch.tensor([0.0] + [0.95] * 7), torch.zeros(8, dtype=torch.int64))
    assert advantages.abs().max() < 10
    assert advantages[0] < 0 < advantages[1]


@pytest.mark.parametrize("rewards", [[0.5] * 8, [1.0] * 8, [0.0] * 8, [0.95] * 8])
def test_a_constant_group_is_filtered_whatever_its_mean(rewards: list[float]) -> None:
    group = Group(group_id="g", prompt=Prompt(prompt_id="p", messages=()), episodes=())
    assert NonzeroStd(NonzeroStd.Config()).drop_reason(group, rewards) is not None


def test_masked_samples_leave_the_denominator_too() -> None:
    both = columns([3, 3], [True] * 3 + [False] * 3)
    alone = columns([3], [True] * 3)
    for kind in ("token", "sequence"):
        weights = token_weights(both, kind, constant_length=0)
        assert weights[:3].tolist() == token_weights(alone, kind, constant_length=0).tolist()
        assert weights[3:].abs().max() == 0


def test_nothing_to_learn_from_is_zero_and_not_nan() -> None:
    batch = columns([4, 0, 1], [False] * 5)
    for term in (Policy(Policy.Config()), Supervised(ComponentConfig())):
        objective = compose(
            estimator=Grpo(GrpoConfig()), terms=[WeightedTerm(name="t", term=term)], aggregation="token"
        )
        logprobs = torch.full((5,), -0.5, requires_grad=True)
        loss, _ = objective.prepare(batch).loss(torch.arange(3), logprobs, {})
        loss.backward()
        assert loss.item() == 0.0
        assert logprobs.grad is not None
        assert logprobs.grad.abs().max() == 0


def test_a_one_episode_group_has_no_advantage() -> None:
    advantages, _ = group_advantages(torch.tensor([3.0]), torch.tensor([0]))
    assert advantages.tolist() == [0.0]
