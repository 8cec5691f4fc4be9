"""Exact checkpoints in the format of `torch.distributed.checkpoint`: any number of ranks reads what any other wrote.

A checkpoint is taken in two parts. `snapshot` copies everything that a step moves to host memory, which is quick;
`write_state` writes the copy, which is slow, and may happen in another thread while the next steps move the originals.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from miles_core.training.scorer import Scorer

__all__ = ["State", "load_state", "snapshot", "write_state"]

State = dict[str, torch.Tensor]


def snapshot(scorer: Scorer, optimizers: Iterable[Optimizer], *, step: int) -> State:
    """A copy in host memory of this rank's part of weights and optimizer state, the step and the random state."""
    state = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(scorer, optimizers).items()}
    return {**state, "step": torch.tensor(step), "rng": torch.get_rng_state()}


def write_state(directory: Path, state: State, group: Any = None) -> None:
    """Write a snapshot. Every rank calls it and writes its own shards; they agree over `group`, which must be theirs
    alone while others talk over the default one."""
    directory.mkdir(parents=True, exist_ok=True)
    with _one_process_is_meant():
        save(state, checkpoint_id=directory, process_group=group)


def load_state(directory: Path, scorer: Scorer, optimizers: Iterable[Optimizer]) -> int:
    """Fill everything in place; the step. Raises `ValueError` for the checkpoint of another model."""
    state = _tensors(scorer, optimizers)
    state["step"] = torch.tensor(0)
    state["rng"] = torch.get_rng_state()
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    different = sorted(
        name
        for name in stored.keys() | state.keys()
        if name not in stored or name not in state or stored[name].size != state[name].shape  # type: ignore[union-attr]
    )
    if different:
        raise ValueError(f"checkpoint {directory} is of another model: {different[:4]} do not match")
    try:
        with _one_process_is_meant():
            load(state, checkpoint_id=directory)
    except CheckpointException as error:
        raise ValueError(f"checkpoint {directory} cannot be read: {error}") from error
    torch.set_rng_state(state["rng"])
    return int(state["step"])


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without a process group torch guesses, rightly, that this is the only process, and warns about its guess."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _tensors(scorer: Scorer, optimizers: Iterable[Optimizer]) -> State:
    """Every tensor that a step moves, by name. Optimizer state that no step has made yet starts as AdamW starts it."""
    names = {parameter: name for name, parameter in scorer.named_parameters()}
    state = {f"weights/{name}": parameter.detach() for parameter, name in names.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own = optimizer.state[parameter]
                if not own:
                    own["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    own["exp_avg"] = torch.zeros_like(parameter)
                    own["exp_avg_sq"] = torch.zeros_like(parameter)
                for key, value in own.items():
                    state[f"optimizer/{names[parameter]}/{key}"] = value.detach()
    return state
