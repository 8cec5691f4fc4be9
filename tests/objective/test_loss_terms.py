"""Loss terms against plain-Python references; aggregation that no layout can change."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import MicroBatch, Needs
from miles_core.errors import NumericsError
from miles_core.objective.aggregation import token_weights
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.distillation import Distillation
from miles_core.objective.entropy import Entropy
from miles_core.objective.grpo import Grpo, GrpoConfig
from miles_core.objective.kl import Kl, KlConfig, kl_estimate
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.objective.supervised import Supervised
from miles_core.objective.value import Value, ValueConfig

KINDS = ["token", "sequence", "constant"]
finite = st.floats(-4, 4)


def micro(logprobs, old, advantages, mask=None, offsets=None, **extra):
    n = len(logprobs)
    tensor = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return MicroBatch(
        offsets=torch.tensor(offsets or [0, n]),
        loss_mask=torch.tensor(mask or [True] * n, dtype=torch.bool),
        logprobs=tensor(logprobs).requires_grad_(),
        old_logprobs=tensor(old),
        rollout_logprobs=tensor(old),
        advantages=tensor(advantages),
        corrections=extra.pop("corrections", torch.ones(n, dtype=torch.float64)),
        **{k: tensor(v) for k, v in extra.items()},
    )


def clipped_loss(ratio, advantage, low, high, dual):
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


tokens = st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), finite, st.booleans()), min_size=1, max_size=12)


@given(tokens, st.sampled_from([0.0, 0.2]), st.sampled_from([0.2, 0.28]), st.sampled_from([None, 3.0]))
def test_policy_is_the_clipped_objective(rows, low, high, dual):
    logp, old, adv, mask = (list(x) for x in zip(*rows, strict=True))
    term = Policy(PolicyConfig(clip_low=low, clip_high=high, dual_clip=dual))
    ours = term.loss(micro(logp, old, adv, mask)).per_token.tolist()
    for t in range(len(rows)):
        if mask[t]:
            assert ours[t] == pytest.approx(clipped_loss(math.exp(logp[t] - old[t]), adv[t], low, high, dual))


@given(tokens, tokens)
def test_sequence_ratio_is_the_geometric_mean_of_its_trajectory(first, second):
    rows = first + second
    logp, old, adv, mask = (list(x) for x in zip(*rows, strict=True))
    term = Policy(PolicyConfig(ratio="sequence", clip_low=0.2, clip_high=0.2))
    ours = term.loss(micro(logp, old, adv, mask, offsets=[0, len(first), len(rows)])).per_token.tolist()
    for start, stop in ((0, len(first)), (len(first), len(rows))):
        kept = [t for t in range(start, stop) if mask[t]]
        mean = math.fsum(logp[t] - old[t] for t in kept) / max(len(kept), 1)
        for t in kept:
            assert ours[t] == pytest.approx(clipped_loss(math.exp(mean), adv[t], 0.2, 0.2, None))


def test_on_policy_gradient_is_minus_the_advantage():
    batch = micro([-1.0, -2.0], [-1.0, -2.0], [0.5, -0.25])
    Policy(PolicyConfig()).loss(batch).per_token.sum().backward()
    assert batch.logprobs.grad.tolist() == [-0.5, 0.25]


def test_corrections_multiply_the_policy_term():
    batch = micro([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0], corrections=torch.tensor([0.0, 2.0]))
    assert Policy(PolicyConfig()).loss(batch).per_token.tolist() == [0.0, -2.0]


@given(st.floats(-3, 0), st.floats(-3, 0))
def test_kl_estimators(logp, reference):
    d = logp - reference
    pair = torch.tensor([logp, reference], dtype=torch.float64)
    estimate = lambda name: kl_estimate(pair[0], pair[1], name).item()  # noqa: E731
    assert estimate("k1") == pytest.approx(d)
    assert estimate("k2") == pytest.approx(d * d / 2)
    assert estimate("k3") == pytest.approx(math.exp(-d) - 1 + d, abs=1e-12)
    assert estimate("k3") >= 0
    assert estimate("k3_clamped") == pytest.approx(min(estimate("k3"), 10))


def test_k3_is_unbiased_and_clamped_k3_bounded():
    torch.manual_seed(0)
    p, q = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    for name in ("k1", "k3"):
        assert float((p.exp() * kl_estimate(p, q, name)).sum()) == pytest.approx(float((p.exp() * (p - q)).sum()))
    far = kl_estimate(torch.tensor(-200.0), torch.tensor(0.0), "k3_clamped")
    assert float(far) == 10.0


def test_k1_as_a_loss_is_refused_with_the_reason():
    with pytest.raises(ValidationError, match="vanishes in expectation"):
        KlConfig(estimator="k1")


def test_unbiased_kl_is_weighted_by_the_ratio():
    batch = micro([-1.0], [-2.0], [0.0], reference_logprobs=[-1.5])
    plain = Kl(KlConfig()).loss(batch).per_token.item()
    assert Kl(KlConfig(unbiased=True)).loss(batch).per_token.item() == pytest.approx(plain * math.e)


def test_entropy_supervised_distillation_and_value():
    batch = micro(
        [-1.0, -2.0, -9.0], [-1.0, -2.5, 0.0], [0.0] * 3, [True, True, False],
        entropy=[0.3, 0.4, 9.0], teacher_logprobs=[-1.5, -1.0, 0.0],
        values=[1.0, 2.0, 5.0], old_values=[1.0, 1.0, 5.0], returns=[0.0, 2.0, 9.0],
    )  # fmt: skip
    masked = lambda term: term.loss(batch).per_token[:2].tolist()  # noqa: E731
    assert masked(Entropy(ComponentConfig())) == [-0.3, -0.4]
    assert masked(Supervised(ComponentConfig())) == [1.0, 2.0]
    assert masked(Distillation(ComponentConfig())) == pytest.approx([0.5, -1.5 * math.exp(0.5)])
    assert masked(Value(ValueConfig(clip=None))) == [0.5, 0.0]
    assert masked(Value(ValueConfig(clip=0.2))) == pytest.approx([0.5, 0.32])


TERMS = [
    Policy(PolicyConfig()),
    Policy(PolicyConfig(ratio="sequence", dual_clip=3.0)),
    Kl(KlConfig()),
    Kl(KlConfig(unbiased=True)),
    Entropy(ComponentConfig()),
    Supervised(ComponentConfig()),
    Value(ValueConfig()),
    Distillation(ComponentConfig()),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "term", [*TERMS, Kl(KlConfig(estimator="k2")), Value(ValueConfig(clip=None))], ids=lambda t: type(t).__name__
)
def test_the_gradient_by_finite_differences(term, seed):
    """Two trajectories, one token of each masked, every input that a term may differentiate; float64."""
    draw = torch.Generator().manual_seed(seed)

    def column(scale=1.0):
        return scale * torch.randn(8, dtype=torch.float64, generator=draw)

    fixed = {name: column() for name in ("advantages", "corrections", "returns")}
    near = {name: column(0.5) - 1 for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs")}
    near |= {"teacher_logprobs": column(0.5) - 1, "old_values": column()}
    mask = torch.tensor([True, True, False, True, True, True, False, True])

    def loss(logprobs, entropy, values):
        batch = MicroBatch(
            offsets=torch.tensor([0, 4, 8]),
            loss_mask=mask,
            logprobs=logprobs,
            entropy=entropy,
            values=values,
            **fixed,
            **near,
        )
        return torch.where(mask, term.loss(batch).per_token, 0.0)

    inputs = [column(0.5) - 1, column().abs(), column()]
    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("term", TERMS, ids=lambda t: type(t).__name__)
def test_what_is_masked_makes_no_nan(slow, term):
    """Garbage at masked tokens reaches neither the loss nor the gradient."""
    columns = slow.make_columns(3)
    n = len(columns.loss_mask)
    garbage = torch.full((n,), math.nan).where(~columns.loss_mask, torch.tensor(-0.5))
    columns = dataclasses.replace(
        columns, old_logprobs=garbage, reference_logprobs=garbage, teacher_logprobs=garbage, values=garbage
    )
    objective = compose(estimator=Grpo(GrpoConfig()), terms=[WeightedTerm(name="x", term=term)])
    prepared = objective.prepare(columns)
    prepared = dataclasses.replace(prepared, returns=garbage)
    logprobs = torch.full((n,), -1.0, requires_grad=True)
    extra = {"entropy": torch.ones(n), "values": torch.ones(n, requires_grad=True)}
    loss, _ = prepared.loss(torch.arange(len(columns.episode_of)), logprobs, extra)
    assert bool(loss.isfinite())
    if loss.requires_grad:
        loss.backward()
        if logprobs.grad is not None:
            assert bool(logprobs.grad.isfinite().all())
            assert bool((logprobs.grad[~columns.loss_mask] == 0).all())


@given(st.integers(0, 300), st.sampled_from(KINDS))
def test_aggregation_is_the_definition(slow, seed, kind):
    columns = slow.make_columns(seed)
    per_token = torch.linspace(-1, 1, len(columns.loss_mask), dtype=torch.float64)
    ours = (token_weights(columns, kind, constant_length=7) * per_token).sum().item()
    assert ours == pytest.approx(slow.aggregate(columns, per_token.tolist(), kind), abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_episodes_are_in_no_denominator(slow, kind):
    """One of six samples masked out must not make the loss smaller."""
    five = slow.plain_columns([1.0] * 5, [0] * 5, masks=[[True] * 4] * 5)
    six = slow.plain_columns([1.0] * 6, [0] * 6, masks=[[True] * 4] * 5 + [[False] * 4])
    assert token_weights(five, kind, constant_length=4).sum() == pytest.approx(
        token_weights(six, kind, constant_length=4).sum().item()
    )


def test_constant_needs_a_length(slow):
    with pytest.raises(ValueError, match="constant_length"):
        token_weights(slow.make_columns(0), "constant")


@given(st.integers(0, 100), st.sampled_from(KINDS), st.sampled_from(["token", "sequence"]), st.randoms())
def test_micro_batching_and_order_do_not_change_loss_or_gradient(slow, seed, kind, ratio, random):
    columns = slow.make_columns(seed)
    objective = compose(
        estimator=Grpo(GrpoConfig()),
        terms=[
            WeightedTerm(name="policy", term=Policy(PolicyConfig(ratio=ratio))),
            WeightedTerm(name="kl", term=Kl(KlConfig()), coefficient=0.1),
        ],
        aggregation=kind,
        constant_length=7,
    )
    prepared = objective.prepare(columns)
    logprobs = torch.linspace(-3, -0.1, len(columns.loss_mask), dtype=torch.float64, requires_grad=True)
    count = len(columns.episode_of)

    def total(parts):
        loss, metrics = 0.0, {}
        for part in parts:
            index = [t for s in part for t in range(columns.offsets[s], columns.offsets[s + 1])]
            share, sums = prepared.loss(torch.tensor(part, dtype=torch.int64), logprobs[index], {})
            loss = loss + share
            for name, value in sums.items():
                metrics[name] = metrics.get(name, 0.0) + value.item()
        (gradient,) = torch.autograd.grad(loss, logprobs)
        return loss.item(), metrics, gradient

    order = list(range(count))
    random.shuffle(order)
    cut = random.randint(0, count)
    whole, metrics, gradient = total([list(range(count))])
    split, split_metrics, split_gradient = total([order[:cut], [], order[cut:]])
    assert split == pytest.approx(whole, rel=1e-6, abs=1e-9)
    assert split_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-6, atol=1e-9)


def test_needs_are_the_union_of_the_parts():
    objective = compose(
        estimator=Grpo(GrpoConfig()),
        terms=[
            WeightedTerm(name="entropy", term=Entropy(ComponentConfig())),
            WeightedTerm(name="kl", term=Kl(KlConfig())),
        ],
    )
    assert objective.needs == Needs.ENTROPY | Needs.REFERENCE


def test_non_finite_numbers_name_their_trajectories(slow):
    columns = slow.plain_columns([0.0, math.inf], [0, 0], lengths=[2, 2])
    objective = compose(estimator=Grpo(GrpoConfig()), terms=[WeightedTerm(name="policy", term=Policy(PolicyConfig()))])
    with pytest.raises(NumericsError, match=r"reward is not finite.*t1;"):
        objective.prepare(columns)
    prepared = objective.prepare(slow.plain_columns([0.0, 1.0], [0, 0], lengths=[2, 2]))
    logprobs = torch.tensor([-1.0, -1.0, math.nan, -1.0])
    with pytest.raises(NumericsError, match=r"loss term policy is not finite.*t1;"):
        prepared.loss(torch.tensor([0, 1]), logprobs, {})


def test_an_advantage_that_is_not_finite_names_its_trajectories(slow):
    class Broken(Grpo):
        def estimate(self, columns):
            found = super().estimate(columns)
            return dataclasses.replace(found, advantages=found.advantages.index_fill(0, torch.tensor([3]), math.nan))

    objective = compose(
        estimator=Broken(GrpoConfig()), terms=[WeightedTerm(name="policy", term=Policy(PolicyConfig()))]
    )
    with pytest.raises(
        NumericsError, match=r"advantage is not finite \(nan\) in trajectories t1; the optimizer has not"
    ):
        objective.prepare(slow.plain_columns([0.0, 1.0], [0, 0], lengths=[2, 2]))


def test_compose_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at least one loss term"):
        compose(estimator=None, terms=[])
    twice = [WeightedTerm(name="kl", term=Kl(KlConfig()))] * 2
    with pytest.raises(ValueError, match="twice"):
        compose(estimator=None, terms=twice)
