"""The same tensors through TRL's loss and ours, where the definitions agree (docs/objectives.md: where they do not)."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from miles_core.contracts.component import ComponentConfig
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.grpo import Grpo, GrpoConfig
from miles_core.objective.kl import Kl, KlConfig
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.objective.supervised import Supervised

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("trl")

LENGTHS = [5, 3, 7, 1, 4, 7]
GROUPS = [0, 0, 0, 1, 1, 1]
WIDTH = max(LENGTHS)


@pytest.fixture(scope="module")
def grpo_trainer():
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


def tensors(spread):
    """Padded [6, 7] log-probs: current (with gradient), old, reference; and one reward a row."""
    torch.manual_seed(1)
    old = -3 * torch.rand(len(LENGTHS), WIDTH, dtype=torch.float64)
    current = (old + spread * torch.randn_like(old)).clamp(max=-1e-3).requires_grad_()
    reference = (old + 0.3 * torch.randn_like(old)).clamp(max=-1e-3)
    return current, old, reference, torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 0.25], dtype=torch.float64)


MASK = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]


def theirs(trainer, loss_type, current, old, reference, rewards, *, level="token", scale="group", beta=0.0, **options):
    groups = rewards.view(2, 3)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)  # as GRPOTrainer computes them
    zeros = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    fake = MagicMock()
    settings = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": beta,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "max_completion_length": 9,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "current_gradient_accumulation_steps": 1,
        "args": SimpleNamespace(delta=options.get("delta"), use_bias_correction_kl=options.get("unbiased", False)),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        "model": SimpleNamespace(training=False),
        "_metrics": {"eval": defaultdict(list), "train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (current, torch.zeros_like(current), None),
    }
    for name, value in settings.items():
        setattr(fake, name, value)
    inputs = {
        "prompt_ids": zeros,
        "prompt_mask": zeros,
        "completion_ids": torch.zeros_like(MASK, dtype=torch.int64),
        "completion_mask": MASK.long(),
        "advantages": advantages.flatten(),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": MASK.sum(),
    }
    return gradient(trainer._compute_loss(fake, None, inputs), current)


def gradient(loss, current):
    (slope,) = torch.autograd.grad(loss, current)
    return loss.item(), slope


def ours(slow, current, old, reference, rewards, *, aggregation, scale="group", terms=None, corrections=(), **policy):
    flat = lambda x: x[MASK]  # noqa: E731
    columns = slow.plain_columns(rewards.tolist(), GROUPS, lengths=LENGTHS)
    columns = columns.__class__(
        **{
            **{name: getattr(columns, name) for name in columns.__dataclass_fields__},
            "old_logprobs": flat(old),
            "rollout_logprobs": flat(old),
            "reference_logprobs": flat(reference),
        }
    )
    clipped = WeightedTerm(name="policy", term=Policy(PolicyConfig(clip_low=0.2, clip_high=0.28, **policy)))
    objective = compose(
        estimator=Grpo(GrpoConfig(scale=scale)),
        terms=[clipped, *(terms or [])],
        corrections=corrections,
        aggregation=aggregation,
        constant_length=9,
    )
    loss, _ = objective.prepare(columns).loss(torch.arange(len(LENGTHS)), flat(current), {})
    return gradient(loss, current)


def same(mine, other):
    assert mine[0] == pytest.approx(other[0], rel=1e-6, abs=1e-7)  # our advantages are float32
    torch.testing.assert_close(mine[1], other[1], rtol=1e-5, atol=1e-8)
    assert float(mine[1].abs().sum()) > 0


SPREADS = pytest.mark.parametrize("spread", [0.0, 0.1, 0.6])


@SPREADS
@pytest.mark.parametrize(("loss_type", "aggregation"), [("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token")])
def test_grpo_and_ppo_clip(slow, grpo_trainer, spread, loss_type, aggregation):
    data = tensors(spread)
    same(ours(slow, *data, aggregation=aggregation), theirs(grpo_trainer, loss_type, *data))


@SPREADS
def test_dr_grpo(slow, grpo_trainer, spread):
    data = tensors(spread)
    mine = ours(slow, *data, aggregation="constant", scale="none")
    same(mine, theirs(grpo_trainer, "dr_grpo", *data, scale="none"))


@SPREADS
def test_gspo(slow, grpo_trainer, spread):
    data = tensors(spread)
    mine = ours(slow, *data, aggregation="sequence", ratio="sequence")
    same(mine, theirs(grpo_trainer, "grpo", *data, level="sequence"))


def test_dual_clip_is_their_delta(slow, grpo_trainer):
    data = tensors(1.5)
    mine = ours(slow, *data, aggregation="token", dual_clip=1.6)
    same(mine, theirs(grpo_trainer, "bnpo", *data, delta=1.6))


@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_to_the_reference(slow, grpo_trainer, unbiased):
    data = tensors(0.1)
    kl = WeightedTerm(name="kl", term=Kl(KlConfig(unbiased=unbiased)), coefficient=0.04)
    mine = ours(slow, *data, aggregation="sequence", terms=[kl])
    same(mine, theirs(grpo_trainer, "grpo", *data, beta=0.04, unbiased=unbiased))


def test_supervised_is_their_fine_tuning_loss(slow):
    """TRL's SFT loss is transformers' cross-entropy, the mean over the tokens of the batch."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    torch.manual_seed(0)
    logits = torch.randn(2, 6, 11, requires_grad=True)
    ids = torch.randint(0, 11, (2, 6))
    labels = ids.clone()
    labels[0, :3] = labels[1, 4:] = -100
    expected = ForCausalLMLoss(logits, labels, vocab_size=11)
    mask = labels[:, 1:] != -100
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    columns = slow.plain_columns([0.0, 0.0], [0, 1], masks=mask.tolist())
    objective = compose(estimator=None, terms=[WeightedTerm(name="supervised", term=Supervised(ComponentConfig()))])
    loss, _ = objective.prepare(columns).loss(torch.arange(2), logprobs.flatten(), {})
    torch.testing.assert_close(loss, expected)
