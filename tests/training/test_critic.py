"""PPO's critic: it learns, by itself at first, and never moves the policy."""

from __future__ import annotations

import hashlib

import pytest

from miles_core.contracts.backends import BackendStart
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.objective.ppo import Ppo, PpoConfig
from miles_core.objective.value import Value, ValueConfig
from miles_core.training.fsdp import FsdpBackend
from miles_core.training.settings import FsdpConfig

POLICY = WeightedTerm(name="policy", term=Policy(PolicyConfig()))
VALUE = WeightedTerm(name="value", term=Value(ValueConfig(clip=None)))


def ppo(*terms):
    return compose(estimator=Ppo(PpoConfig(**{"lambda": 1.0})), terms=terms or (POLICY, VALUE))


@pytest.fixture
def critics(directory):
    def make(**config):
        backend = FsdpBackend(FsdpConfig(**{"learning_rate": 1e-2, "critic_learning_rate": 1e-2, **config}))
        backend.start(
            BackendStart(
                model_directory=directory, dtype="float32", seed=0, temperature=1.0, total_steps=10, critic=True
            )
        )
        return backend

    return make


def digest(backend, part=""):
    made = hashlib.sha256()
    for name, tensor in backend.trainer.scorer.state_dict().items():
        if name.startswith(part):
            made.update(tensor.contiguous().numpy().tobytes())
    return made.hexdigest()


def test_the_value_loss_moves_the_head_and_never_the_model(critics, batches):
    backend = critics()
    model, head = digest(backend, "model."), digest(backend, "critic.")
    report = backend.train_step(batches(), ppo(VALUE))
    assert digest(backend, "model.") == model
    assert digest(backend, "critic.") != head
    assert report.metrics["critic/grad_norm"] > 0
    assert report.grad_norm == 0


def test_the_critic_learns_the_return(critics, batches):
    backend = critics()
    errors = [backend.train_step(batches(), ppo(VALUE)).metrics["value/error"] for _ in range(30)]
    assert errors[-1] < 0.3 * errors[0]


def test_warm_up_steps_move_the_head_alone(critics, batches):
    backend = critics(critic_warmup_steps=2)
    model = digest(backend, "model.")
    for seed in (0, 1):
        assert backend.train_step(batches(seed), ppo()).grad_norm > 0
        assert digest(backend, "model.") == model
    assert backend.train_step(batches(2), ppo()).step == 3
    assert digest(backend, "model.") != model


def test_a_checkpoint_holds_the_critic(critics, batches, tmp_path):
    straight, resumed = critics(), critics()
    straight.train_step(batches(0), ppo())
    straight.save(tmp_path)
    straight.train_step(batches(1), ppo())
    resumed.load(tmp_path)
    resumed.train_step(batches(1), ppo())
    assert digest(resumed) == digest(straight)


def test_neither_published_nor_exported(critics, tmp_path):
    from safetensors.torch import load_file

    backend = critics()
    backend.export(tmp_path)
    assert not [name for name, _ in backend.named_weights() if "critic" in name]
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "critic" in name]


def test_values_are_computed_where_they_are_asked_for(critics, batches):
    from miles_core.contracts.objective import Needs

    backend, batch = critics(), batches()
    backend.train_step(batch, ppo())
    trajectories, masks = batch.trajectories, [t.loss_mask for t in batch.trajectories]
    columns = backend.trainer._columns(batch, trajectories, masks, Needs.VALUES)
    assert bool((columns.values[~columns.loss_mask] == 0).all())
    assert bool((columns.values[columns.loss_mask] != 0).all())
    assert columns.old_logprobs is None  # nobody asked
