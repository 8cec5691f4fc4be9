"""The `fsdp` backend: one process, or several that share the model. The component loads torch when it starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.contracts.backends import BackendStart, StepReport, TrainBackend, WeightStream
from miles_core.training.settings import FsdpConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from miles_core.contracts.objective import Objective
    from miles_core.data.group import Batch
    from miles_core.data.trajectory import Trajectory
    from miles_core.training.trainer import Trainer

__all__ = ["FsdpBackend"]


class FsdpBackend(TrainBackend[FsdpConfig]):
    """Trains a transformers model. Packed, with a group's prompt computed once; float32 master weights."""

    Config = FsdpConfig

    def __init__(self, config: FsdpConfig) -> None:
        super().__init__(config)
        self._trainer: Trainer | None = None

    @property
    def processes(self) -> int:
        return self.config.nproc

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "start() comes first"
        return self._trainer

    def start(self, start: BackendStart) -> None:
        if not 0 <= start.rank < start.world_size:
            raise ValueError(f"rank is {start.rank}, expected 0 to world_size - 1 = {start.world_size - 1}")
        from miles_core.training.trainer import Trainer

        self._trainer = Trainer(self.config, start)

    def logprobs(self, trajectories: Iterable[Trajectory]) -> list[NDArray[np.float32]]:
        import numpy as np

        trajectories = list(trajectories)
        return self.trainer.logprobs(trajectories, [np.ones(len(t), dtype=np.bool_) for t in trajectories])

    def train_step(self, batch: Batch, objective: Objective) -> StepReport:
        return self.trainer.train_step(batch, objective)

    def named_weights(self) -> WeightStream:
        return self.trainer.named_weights()

    def save(self, directory: Path) -> None:
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: Path) -> None:
        self.trainer.begin_save(directory)

    def finish_save(self, *, wait: bool = True) -> bool:
        return self.trainer.finish_save(wait=wait)

    def load(self, directory: Path) -> None:
        self.trainer.load(directory)

    def sleep(self) -> None:
        import torch

        self.trainer.move(torch.device("cpu"))

    def wake(self) -> None:
        self.trainer.move(self.trainer.device)

    def export(self, directory: Path) -> None:
        self.trainer.export(directory)

    def begin_export(self, directory: Path) -> None:
        self.trainer.begin_export(directory)

    def finish_export(self, *, wait: bool = True) -> bool:
        return self.trainer.finish_export(wait=wait)
