"""An export that is written beside the next steps is of the weights that it was begun with."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from miles_core.contracts.backends import BackendStart  # noqa: E402
from miles_core.models.reference import resolve_model  # noqa: E402
from miles_core.training.beside import Beside  # noqa: E402
from miles_core.training.fsdp import FsdpBackend, FsdpConfig  # noqa: E402


def test_weights_that_move_meanwhile_are_not_in_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve_model("tiny:0").directory
    backend = FsdpBackend(FsdpConfig())
    backend.start(BackendStart(model_directory=directory, dtype="float32", seed=0, temperature=1.0, total_steps=1))
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    backend.begin_export(tmp_path / "version")
    with torch.no_grad():
        for parameter in backend.trainer.policy:
            parameter.add_(1.0)
    assert backend.finish_export()
    found = load_file(tmp_path / "version" / "model.safetensors")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(tmp_path / "version")
    AutoTokenizer.from_pretrained(tmp_path / "version")


def test_what_writing_met_is_raised_once() -> None:
    def full() -> None:
        raise OSError("no space left on device")

    beside = Beside("test")
    beside.begin(full)
    with pytest.raises(OSError, match="no space"):
        beside.finish()
    assert beside.finish()
