"""Laws of train backends: log-probs, a step that moves the weights, a continuation to the bit, a refusal of NaN.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.backends import BackendStart, TrainBackend
from miles_core.contracts.objective import BatchColumns, Needs
from miles_core.data.group import Batch, Episode, Group, Prompt
from miles_core.data.trajectory import NOT_SAMPLED, Status, Trajectory
from miles_core.errors import NumericsError
from miles_core.testing.kit import Case, Check
from miles_core.testing.tiny import tiny_model

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS"]


def logprobs_are_of_every_token(case: Case) -> None:
    backend = _started(case)
    trajectories = _batch().trajectories
    before = _digest(backend)
    found = backend.logprobs(trajectories)
    assert len(found) == len(trajectories), f"{len(trajectories)} trajectories got {len(found)} columns"
    for trajectory, column in zip(trajectories, found, strict=True):
        assert column.shape == (len(trajectory),), (
            f"a trajectory of {len(trajectory)} tokens got log-probs of shape {column.shape}"
        )
        assert column.dtype == np.float32, f"log-probs are {column.dtype}, expected float32"
        assert bool((column <= 1e-6).all()), f"a log-prob is {column.max()}, above 0 (or not a number)"
        assert column[0] == 0, f"the first token's log-prob is {column[0]}, expected 0: no prefix predicts it"
        assert bool((column[1:] < 0).all()), "the log-prob of a token that follows others is 0"
    assert _digest(backend) == before, "logprobs() moves the weights"


def a_step_moves_the_weights(case: Case) -> None:
    backend = _started(case)
    before = _digest(backend)
    report = backend.train_step(_batch(), _Objective())
    assert _digest(backend) != before, "train_step() leaves the weights as they were"
    assert report.step == 1, f"the first step is reported as step {report.step}"
    numbers = {"loss": report.loss, "grad_norm": report.grad_norm, **report.metrics, **report.seconds}
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    assert not wrong, f"the report is not finite: {', '.join(wrong)}"
    assert report.grad_norm > 0, "the gradient's norm is 0 though the weights moved"


def a_step_goes_downhill(case: Case) -> None:
    """Negative log-likelihood of the sampled tokens falls over a few steps on one batch."""
    backend, batch = _started(case), _batch()
    losses = [backend.train_step(batch, _Objective()).loss for _ in range(4)]
    assert losses[-1] < losses[0], f"minimising a loss on one batch raises it: {losses}"


def save_and_load_continue_to_the_bit(case: Case) -> None:
    first, directory = _started(case), case.new_directory()
    first.train_step(_batch(), _Objective())
    first.save(directory)
    first.train_step(_batch(1), _Objective())
    second = _started(case)
    second.load(directory)
    report = second.train_step(_batch(1), _Objective())
    assert report.step == 2, f"after loading a checkpoint of step 1, the next step is {report.step}"
    assert _digest(first) == _digest(second), "a step after load() gives other weights than it gave before save()"


def nan_is_refused_before_anything_moves(case: Case) -> None:
    backend = _started(case)
    backend.train_step(_batch(), _Objective())
    before = _digest(backend)
    try:
        backend.train_step(_batch(1), _Objective(factor=math.nan))
    except NumericsError:
        pass
    else:
        raise AssertionError("a loss that is not a number is trained on; expected NumericsError")
    assert _digest(backend) == before, "the weights moved before NumericsError was raised"
    other = _started(case)
    for one in (backend, other):
        if one is other:
            one.train_step(_batch(), _Objective())
        one.train_step(_batch(1), _Objective())
    assert _digest(backend) == _digest(other), "a refused step leaves something behind: the next one differs"


def weights_have_their_checkpoint_names(case: Case) -> None:
    backend = _started(case)
    names = [name for name, _ in backend.named_weights()]
    assert len(set(names)) == len(names), "a weight is streamed twice"
    expected = _checkpoint_names(tiny_model())
    assert set(names) == expected, (
        f"weights are streamed under other names than the checkpoint's: {sorted(set(names) ^ expected)[:6]}"
    )
    backend.train_step(_batch(), _Objective())
    assert [name for name, _ in backend.named_weights()] == names, "names or their order change with a step"


def export_is_the_model(case: Case) -> None:
    from transformers import AutoModelForCausalLM

    backend, directory = _started(case), case.new_directory() / "exported"
    backend.train_step(_batch(), _Objective())
    backend.export(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    exported = model.state_dict()
    for name, tensor in backend.named_weights():
        assert name in exported, f"the exported model has no weight {name}"
        same = bool((exported[name].float() == tensor.detach().cpu().float()).all())
        assert same, f"the exported {name} is not what was trained"


CHECKS: tuple[Check, ...] = (
    logprobs_are_of_every_token,
    a_step_moves_the_weights,
    a_step_goes_downhill,
    save_and_load_continue_to_the_bit,
    nan_is_refused_before_anything_moves,
    weights_have_their_checkpoint_names,
    export_is_the_model,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Objective:
    """Mean negative log-likelihood of the trainable tokens, times `factor`."""

    factor: float = 1.0

    @property
    def needs(self) -> Needs:
        return Needs.NOTHING

    def prepare(self, columns: BatchColumns) -> _Prepared:
        return _Prepared(columns=columns, factor=self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
    columns: BatchColumns
    factor: float

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def loss(
        self, trajectories: torch.Tensor, logprobs: torch.Tensor, extra: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        import torch

        bounds = self.columns.offsets.tolist()
        mask = torch.cat([self.columns.loss_mask[bounds[s] : bounds[s + 1]] for s in trajectories.tolist()])
        total = -logprobs.where(mask.to(logprobs.device), logprobs.new_zeros(())).sum()
        return self.factor * total / max(int(self.columns.loss_mask.sum()), 1), {}


def _started(case: Case) -> TrainBackend[Any]:
    backend: TrainBackend[Any] = case.create()
    backend.start(BackendStart(model_directory=tiny_model(), dtype="float32", seed=0, temperature=1.0, total_steps=10))
    return backend


def _batch(seed: int = 0) -> Batch:
    """Two groups of two episodes over random ids."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(2):
        prompt = rng.integers(3, 250, 5)
        episodes = []
        for e in range(2):
            ids = np.concatenate([prompt, rng.integers(3, 250, 3 + e)]).astype(np.int32)
            sampled = np.arange(len(ids)) >= len(prompt)
            trajectory = Trajectory(
                token_ids=ids,
                loss_mask=sampled,
                logprobs=np.where(sampled, -5.0, 0.0).astype(np.float32),
                versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
                prompt_id=f"p{g}",
                group_id=f"g{g}",
                episode_id=f"g{g}.{e}",
                trajectory_id=f"g{g}.{e}.0",
                reward=float(e),
            )
            episodes.append(
                Episode(
                    episode_id=f"g{g}.{e}",
                    prompt_id=f"p{g}",
                    group_id=f"g{g}",
                    status=Status.COMPLETED,
                    trajectories=(trajectory,),
                    reward=float(e),
                )
            )
        groups.append(Group(group_id=f"g{g}", prompt=Prompt(prompt_id=f"p{g}", messages=()), episodes=tuple(episodes)))
    return Batch(groups=tuple(groups), policy_version=0, step=0)


def _digest(backend: TrainBackend[Any]) -> dict[str, bytes]:
    import torch

    return {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in backend.named_weights()
    }


def _checkpoint_names(directory: Path) -> set[str]:
    """Names in the directory's safetensors files (format: 8 bytes of header length, then a JSON header)."""
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        names |= header.keys() - {"__metadata__"}
    return names
