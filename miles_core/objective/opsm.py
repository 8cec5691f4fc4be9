"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): drop bad sequences that have drifted too far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import BatchColumns, Corrected, Correction
from miles_core.objective.columns import segment_mean, token_trajectory
from miles_core.objective.tis import mismatch

if TYPE_CHECKING:
    import torch

__all__ = ["Opsm", "OpsmConfig"]


class OpsmConfig(ComponentConfig):
    """Section of `opsm`."""

    delta: float = Field(default=0.1, gt=0)
    """Largest mean of log π_rollout − log π_train, in nats per token, of a sequence with a negative advantage."""


class Opsm(Correction[OpsmConfig]):
    """A whole trajectory is masked, never single tokens: when its mean advantage is negative and the policy has moved
    away from it by more than δ."""

    Config = OpsmConfig

    def correct(self, columns: BatchColumns, advantages: torch.Tensor) -> Corrected:
        drift = -segment_mean(mismatch(columns), columns.loss_mask, columns.offsets)
        sign = segment_mean(advantages.double(), columns.loss_mask, columns.offsets)
        masked = (sign < 0) & (drift > self.config.delta)
        kept = (~masked).float()[token_trajectory(columns.offsets)]
        return Corrected(weights=kept, metrics={"masked_trajectories": float(masked.sum())})
