"""The backend: what a step is, that nothing but weights, state and batch decides it, and what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_core.contracts.backends import BackendStart
from miles_core.contracts.component import ComponentConfig
from miles_core.errors import ModelError, NumericsError
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.entropy import Entropy
from miles_core.objective.grpo import Grpo, GrpoConfig
from miles_core.objective.kl import Kl, KlConfig
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.objective.tis import Tis, TisConfig
from miles_core.objective.value import Value, ValueConfig
from miles_core.training.fsdp import FsdpBackend
from miles_core.training.schedule import learning_rate
from miles_core.training.settings import FsdpConfig


def an_objective(*terms, corrections=()):
    terms = terms or (WeightedTerm(name="policy", term=Policy(PolicyConfig())),)
    return compose(estimator=Grpo(GrpoConfig()), terms=terms, corrections=corrections)


FULL = an_objective(
    WeightedTerm(name="policy", term=Policy(PolicyConfig())),
    WeightedTerm(name="kl", term=Kl(KlConfig()), coefficient=0.1),
    WeightedTerm(name="entropy", term=Entropy(ComponentConfig()), coefficient=0.01),
    corrections=[("tis", Tis(TisConfig()))],
)


def weights_digest(backend):
    digest = hashlib.sha256()
    for name, tensor in backend.named_weights():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_a_step_moves_the_weights_and_reports_finite_numbers(backends, batches):
    backend = backends()
    before = weights_digest(backend)
    report = backend.train_step(batches(), FULL)
    assert weights_digest(backend) != before
    assert report.step == 1
    assert report.grad_norm > 0
    assert all(np.isfinite(v) for v in report.metrics.values())
    assert {"policy/ratio", "kl/kl", "entropy/entropy", "tis/weight_mean", "fidelity/abs_difference_mean"} <= set(
        report.metrics
    )
    assert report.metrics["kl/kl"] == pytest.approx(0, abs=1e-9)  # the reference is where the run started


def test_micro_batches_and_sharing_do_not_change_the_step(backends, batches):
    reports = [
        backends(max_tokens_per_microbatch=budget, share_prefix=share).train_step(batches(), FULL)
        for budget, share in ((4096, True), (4096, False), (20, True), (1, False))
    ]
    for report in reports[1:]:
        assert report.loss == pytest.approx(reports[0].loss, rel=1e-5, abs=1e-7)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
        for name, value in reports[0].metrics.items():
            assert report.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_activation_checkpointing_changes_nothing(backends, batches):
    plain, checkpointed = backends(), backends(activation_checkpointing=True)
    assert plain.train_step(batches(), FULL).grad_norm == checkpointed.train_step(batches(), FULL).grad_norm
    assert weights_digest(plain) == weights_digest(checkpointed)


def test_learns_what_is_rewarded(backends, batches):
    """The tokens of rewarded answers become likelier than those of the others."""
    backend, batch = backends(), batches(5)
    scored = lambda: [float(x.sum()) for x in backend.logprobs(batch.trajectories)]  # noqa: E731
    before = scored()
    for _ in range(5):
        backend.train_step(
            batch, an_objective(WeightedTerm(name="policy", term=Policy(PolicyConfig(clip_high=1e9, clip_low=1))))
        )
    gain = np.array(scored()) - before
    best = [max(g.episodes, key=lambda e: e.reward).trajectories[0].trajectory_id for g in batch.groups]
    worst = [min(g.episodes, key=lambda e: e.reward).trajectories[0].trajectory_id for g in batch.groups]
    by_id = {t.trajectory_id: x for t, x in zip(batch.trajectories, gain, strict=True)}
    trained = {t.trajectory_id for t in batch.trajectories if t.trainable_tokens}
    assert all(by_id[b] > by_id[w] for b, w in zip(best, worst, strict=True) if {b, w} <= trained)


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from conftest import make_backend, make_batch
from test_fsdp import FULL, weights_digest
backend = make_backend(Path({directory!r}))
for seed in (0, 1):
    backend.train_step(make_batch(seed), FULL)
print(weights_digest(backend))
"""


def test_the_same_bits_in_a_new_process(backends, batches, directory):
    backend = backends()
    for seed in (0, 1):
        backend.train_step(batches(seed), FULL)
    here = Path(__file__).parent
    script = textwrap.dedent(SCRIPT).format(tests=str(here), root=str(here.parents[1]), directory=str(directory))
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **threads},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == weights_digest(backend)


def test_save_and_load_continue_bit_for_bit(backends, batches, tmp_path):
    straight = backends(schedule="cosine", warmup_steps=2)
    straight.train_step(batches(0), FULL)
    straight.save(tmp_path)
    straight.train_step(batches(1), FULL)
    resumed = backends(schedule="cosine", warmup_steps=2)
    resumed.train_step(batches(2), FULL)  # another history, to be forgotten
    resumed.load(tmp_path)
    report = resumed.train_step(batches(1), FULL)
    assert report.step == 2
    assert weights_digest(resumed) == weights_digest(straight)


def test_loading_another_models_checkpoint_is_refused(backends, tmp_path):
    backends().save(tmp_path)
    other = backends(lora={"rank": 2})
    with pytest.raises(ValueError, match="another model"):
        other.load(tmp_path)


def test_weights_have_checkpoint_names_and_tied_ones_appear_once(backends, directory):
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "pt") as stored:
        ours = dict(backends().named_weights())
        assert set(ours) == set(stored.keys())
        assert "lm_head.weight" not in ours
        for name, tensor in ours.items():
            assert torch.equal(tensor, stored.get_tensor(name))
            assert not tensor.requires_grad


def test_export_loads_in_transformers(backends, batches, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    backend = backends()
    backend.train_step(batches(), FULL)
    backend.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    trajectory = batches().trajectories[-1]
    ids = torch.from_numpy(trajectory.token_ids.copy()).long()
    expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    (ours,) = backend.logprobs([trajectory])
    np.testing.assert_allclose(ours[1:], expected.detach().numpy(), atol=1e-5)
    assert ours[0] == 0
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


def test_logprobs_are_at_the_sampling_temperature(backends, batches):
    trajectory = batches().trajectories[-1]
    (warm,), (cool,) = (backends(temperature=t).logprobs([trajectory]) for t in (1.0, 0.5))
    assert not np.allclose(warm, cool)


def test_bfloat16_computes_low_and_keeps_float32_masters(backends, batches):
    low, high = backends(dtype="bfloat16"), backends()
    assert {t.dtype for _, t in low.named_weights()} == {torch.float32}
    reports = [b.train_step(batches(), FULL) for b in (low, high)]
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=0.1)
    assert reports[0].grad_norm != reports[1].grad_norm


@pytest.mark.parametrize("reward", [float("inf"), None])
def test_a_missing_or_infinite_reward_is_refused(backends, batches, reward):
    batch = batches(reward=1.0)
    object.__setattr__(batch.trajectories[3], "reward", reward)
    backend = backends()
    before = weights_digest(backend)
    with pytest.raises(ValueError, match=batch.trajectories[3].trajectory_id):
        backend.train_step(batch, FULL)
    assert weights_digest(backend) == before


def poison(backend):
    """NaN in the embedding of one id: only trajectories that contain it are hurt."""
    with torch.no_grad():
        backend.trainer.scorer.model.get_input_embeddings().weight[295] = float("nan")


def with_id(batch, which, token):
    trajectory = batch.trajectories[which]
    ids = trajectory.token_ids.copy()
    ids[-2] = token
    object.__setattr__(trajectory, "token_ids", ids)
    return batch


def test_a_nan_names_its_trajectories_before_the_optimizer_moves(backends, batches):
    backend = backends()
    backend.trainer.scorer.model.config.tie_word_embeddings = False
    head = backend.trainer.scorer.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # only the input side is poisoned
    poison(backend)
    batch = with_id(batches(), 6, 295)
    before = weights_digest(backend)
    with pytest.raises(NumericsError, match=r"loss term policy is not finite.*g1e2;"):
        backend.train_step(batch, an_objective())
    assert weights_digest(backend) == before
    assert all(p.grad is None for p in backend.trainer.scorer.parameters())


def test_an_infinite_gradient_names_its_trajectories(backends, batches):
    backend = backends(max_tokens_per_microbatch=1, share_prefix=False)
    before = weights_digest(backend)

    class Overflowing:
        needs = FULL.needs

        def prepare(self, columns):
            prepared = an_objective().prepare(columns)
            weights = prepared.weights.clone()
            weights[-1] = 1e38
            return dataclasses.replace(prepared, weights=weights, factors=prepared.factors * 10)

    with pytest.raises(NumericsError, match=r"gradient norm is (inf|nan) in the micro-batch of g1e3;"):
        backend.train_step(batches(), Overflowing())
    assert weights_digest(backend) == before


def test_nothing_trainable_is_a_step_of_zero(backends, batches):
    batch = batches(reward=1.0)  # equal rewards: all advantages are 0
    backend = backends()
    report = backend.train_step(batch, an_objective())
    assert report.loss == 0
    assert report.grad_norm == 0


def test_what_the_backend_does_not_provide_is_refused(backends, batches):
    objective = an_objective(WeightedTerm(name="value", term=Value(ValueConfig())))
    with pytest.raises(ValueError, match="without a critic"):
        backends().train_step(batches(), objective)


def test_starts_that_cannot_work_are_refused(directory, tmp_path):
    def start(**changes):
        usual = {"model_directory": directory, "dtype": "float32", "seed": 0, "temperature": 1.0, "total_steps": 1}
        return BackendStart(**{**usual, **changes})

    with pytest.raises(ValueError, match="rank is 2"):
        FsdpBackend(FsdpConfig()).start(start(rank=2, world_size=2))
    with pytest.raises(ModelError, match="float16"):
        FsdpBackend(FsdpConfig()).start(start(dtype="float16"))
    with pytest.raises(ModelError, match="cannot load"):
        FsdpBackend(FsdpConfig()).start(start(model_directory=tmp_path))


def test_schedules():
    def rate(step, schedule):
        return learning_rate(step, peak=1.0, schedule=schedule, warmup_steps=4, total_steps=11, final_fraction=0.1)

    assert [rate(s, "constant") for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate(10, "constant") == 1.0
    assert rate(10, "linear") == pytest.approx(0.1)
    assert rate(7, "linear") == pytest.approx(0.55)
    assert rate(7, "cosine") == pytest.approx(0.55)
    assert rate(10, "cosine") == rate(99, "cosine") == pytest.approx(0.1)


def test_importing_the_component_does_not_import_torch():
    modules = "miles_core.training.fsdp, miles_core.objective.compose, miles_core.objective.mis"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
