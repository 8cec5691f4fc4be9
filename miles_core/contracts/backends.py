"""Train backends: turn a batch and an objective into an optimizer step.

A backend lives in the trainer process. The controller talks to it through `miles_core.training.worker`, so the
controller itself never imports torch.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.contracts.component import Component, ConfigT

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from miles_core.contracts.objective import Objective
    from miles_core.data.group import Batch
    from miles_core.data.trajectory import Trajectory

__all__ = ["BackendStart", "StepReport", "TrainBackend", "WeightStream"]

WeightStream = Iterable[tuple[str, "torch.Tensor"]]
"""(checkpoint name, tensor) pairs, one at a time, gathered from shards. Tied weights appear once."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackendStart:
    """What a run tells a backend when it starts.

    `rendezvous` is the `host:port` of the store at which the `world_size` ranks meet; empty: where the environment says
    (`torchrun`). `critic`: the objective asks for values (`Needs.VALUES`).
    """

    model_directory: Path
    dtype: str
    seed: int
    temperature: float
    total_steps: int
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    critic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimizer step was: `metrics` are plain finite numbers, `seconds` by phase."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


class TrainBackend(Component[ConfigT], abc.ABC):
    """Owns the trained model, its optimizer and its random state.

    With several processes every one of them gets every call, with the same arguments, and rank 0 answers.
    """

    @property
    def processes(self) -> int:
        """Trainer processes that a run starts for this backend; read in the controller."""
        return 1

    @abc.abstractmethod
    def start(self, start: BackendStart) -> None:
        """Load the model. Raises `ModelError` when it cannot be trained with this backend."""

    @abc.abstractmethod
    def logprobs(self, trajectories: Iterable[Trajectory]) -> list[NDArray[np.float32]]:
        """Log-prob of every token of each trajectory under the current weights, float32 [T] each, at the sampling
        temperature (natural log); entry 0 is 0, no prefix predicts it. Does not touch gradients."""

    @abc.abstractmethod
    def train_step(self, batch: Batch, objective: Objective) -> StepReport:
        """One optimizer step on the whole batch. Raises `NumericsError` before the optimizer moves when the loss, an
        advantage or a gradient is not finite, naming the trajectories."""

    @abc.abstractmethod
    def named_weights(self) -> WeightStream:
        """The current weights under their Hugging Face checkpoint names."""

    @abc.abstractmethod
    def save(self, directory: Path) -> None:
        """Everything a bit-identical continuation needs: weights, optimizer, scheduler, random state."""

    def begin_save(self, directory: Path) -> None:
        """Take a snapshot of everything, and write it while the next steps move on. Default: `save`."""
        self.save(directory)

    def finish_save(self, *, wait: bool = True) -> bool:
        """Whether what `begin_save` began is complete on disk; with `wait` it is. Raises what the writing met. Default:
        it is."""
        return True

    @abc.abstractmethod
    def load(self, directory: Path) -> None:
        """The inverse of `save`."""

    @abc.abstractmethod
    def export(self, directory: Path) -> None:
        """A Hugging Face model directory that `transformers` loads."""

    def begin_export(self, directory: Path) -> None:
        """Take a copy of the weights, and write their model directory while the next steps move on; adapters are merged
        into it. Default: `export`."""
        self.export(directory)

    def finish_export(self, *, wait: bool = True) -> bool:
        """As `finish_save`, of `begin_export`. Default: it is."""
        return True

    def sleep(self) -> None:
        """Release the accelerator's memory while the engines use it. Default: nothing to release."""

    def wake(self) -> None:
        """The inverse of `sleep`."""
