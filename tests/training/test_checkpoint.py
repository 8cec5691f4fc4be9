"""Checkpoints are written beside the next steps, hold the state of the moment they were begun, and resume exactly."""

from __future__ import annotations

import hashlib
import threading

import pytest

from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.grpo import Grpo, GrpoConfig
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.training import trainer as trainer_module

FULL = compose(estimator=Grpo(GrpoConfig()), terms=[WeightedTerm(name="policy", term=Policy(PolicyConfig()))])


def weights_digest(backend):
    return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in backend.named_weights()}


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until the gate is opened."""
    opened, write = threading.Event(), trainer_module.write_state

    def slow(*arguments):
        assert opened.wait(30)
        write(*arguments)

    monkeypatch.setattr(trainer_module, "write_state", slow)
    return opened


def test_steps_go_on_while_it_is_written_and_do_not_reach_it(backends, batches, tmp_path, gate):
    backend = backends()
    backend.train_step(batches(0), FULL)
    backend.begin_save(tmp_path / "checkpoint")
    then = weights_digest(backend)
    following = backend.train_step(batches(1), FULL)
    assert not backend.finish_save(wait=False)
    assert not (tmp_path / "checkpoint").exists()
    gate.set()
    assert backend.finish_save()
    resumed = backends()
    resumed.load(tmp_path / "checkpoint")
    assert weights_digest(resumed) == then
    again = resumed.train_step(batches(1), FULL)
    assert (again.loss, again.grad_norm) == (following.loss, following.grad_norm)
    assert weights_digest(resumed) == weights_digest(backend)


def test_what_writing_met_is_raised_once(backends, tmp_path):
    backend = backends()
    (tmp_path / "file").write_text("")
    backend.begin_save(tmp_path / "file" / "checkpoint")
    with pytest.raises(OSError):
        backend.finish_save()
    assert backend.finish_save()
