"""LoRA: only the adapter trains; what is published is merged; what is exported loads elsewhere."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from miles_core.contracts.component import ComponentConfig
from miles_core.errors import ModelError
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.none import NoAdvantages
from miles_core.objective.supervised import Supervised

pytest.importorskip("peft")

OBJECTIVE = compose(
    estimator=NoAdvantages(ComponentConfig()),
    terms=[WeightedTerm(name="supervised", term=Supervised(ComponentConfig()))],
)
LORA = {"rank": 4, "alpha": 8}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def trained(backends, batches):
    backend = backends(lora=LORA)
    reports = [backend.train_step(batches(seed), OBJECTIVE) for seed in (0, 1, 2)]
    return backend, reports


def snapshot(backend):
    return {name: tensor.clone() for name, tensor in backend.named_weights()}


def test_a_fresh_adapter_changes_nothing(backends, batches):
    batch = batches()
    plain, adapted = (b.logprobs(batch.trajectories) for b in (backends(), backends(lora=LORA)))
    for mine, theirs in zip(adapted, plain, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_published_names_are_those_of_the_checkpoint_and_every_step_changes_the_adapted_ones(backends, batches):
    backend = backends(lora=LORA)
    start = snapshot(backends())
    states = [snapshot(backend)]
    for seed in (0, 1, 2):
        backend.train_step(batches(seed), OBJECTIVE)
        states.append(snapshot(backend))
    assert list(states[0]) == list(start)
    assert all(torch.equal(states[0][name], start[name]) for name in start)
    for earlier, later in pairwise(states):
        changed = {name for name in start if not torch.equal(earlier[name], later[name])}
        assert changed == {name for name in start if name.split(".")[-2] in TARGETS}


def test_only_the_adapter_has_gradients_and_optimizer_state(trained):
    backend, reports = trained
    trainer = backend.trainer
    names = {n for n, p in trainer.scorer.named_parameters() if p.requires_grad}
    assert names
    assert all(".lora_" in name for name in names)
    assert len(trainer.optimizer.state) == len(names)
    assert len({r.grad_norm for r in reports}) == 3


def test_the_merged_weights_compute_what_the_adapter_does(trained, batches, tmp_path):
    from transformers import AutoModelForCausalLM

    backend, _ = trained
    backend.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    compare(model, backend, batches())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by the old name
def test_the_exported_adapter_loads_in_peft(trained, batches, tmp_path, directory):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend, _ = trained
    backend.export(tmp_path)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), tmp_path / "adapter")
    compare(model, backend, batches())


def compare(model, backend, batch):
    trajectory = batch.trajectories[-1]
    ids = torch.tensor(trajectory.token_ids.tolist())
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    (ours,) = backend.logprobs([trajectory])
    np.testing.assert_allclose(ours[1:], expected.numpy(), atol=1e-5)


def test_a_checkpoint_continues_bit_for_bit(trained, backends, batches, tmp_path):
    backend, _ = trained
    backend.save(tmp_path)
    backend.train_step(batches(3), OBJECTIVE)
    resumed = backends(lora=LORA)
    resumed.load(tmp_path)
    resumed.train_step(batches(3), OBJECTIVE)
    mine, theirs = snapshot(resumed), snapshot(backend)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_target_that_is_no_layer_is_refused(backends):
    with pytest.raises(ModelError, match=r"backend.lora.targets = \['qproj'\]"):
        backends(lora={"targets": ["qproj"]})
