"""Masked importance sampling: a trust region on π_train / π_rollout by token, sequence or geometric mean.

Levels and modes as in "When Speed Kills Stability" (richardli.xyz/rl-collapse, 2025).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import BatchColumns, Corrected, Correction
from miles_core.objective.columns import segment_mean, token_trajectory
from miles_core.objective.tis import changed_share, mismatch

if TYPE_CHECKING:
    import torch

__all__ = ["Mis", "MisConfig"]


class MisConfig(ComponentConfig):
    """Section of `mis`."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of each token, product over the trajectory, or its geometric mean."""

    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """truncate: at most `high`; clip: into [low, high]; mask: weight 0 outside [low, high]."""

    low: float = Field(default=0.5, gt=0)
    """Lower bound (clip and mask)."""

    high: float = Field(default=2.0, gt=0)
    """Upper bound."""

    veto: float | None = Field(default=None, gt=0, lt=1)
    """A trajectory with one token's ratio below this is dropped whole. None: no veto."""

    @model_validator(mode="after")
    def _ordered(self) -> MisConfig:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


class Mis(Correction[MisConfig]):
    """One weight a token (level `token`) or a trajectory (the others)."""

    Config = MisConfig

    def correct(self, columns: BatchColumns, advantages: torch.Tensor) -> Corrected:
        mask = columns.loss_mask
        owner = token_trajectory(columns.offsets)
        difference = mismatch(columns)
        log_ratio = difference
        if self.config.level != "token":
            per_trajectory = segment_mean(difference, mask, columns.offsets)
            if self.config.level == "sequence":
                counts = per_trajectory.new_zeros(len(per_trajectory)).index_add(0, owner, mask.double())
                per_trajectory = per_trajectory * counts
            log_ratio = per_trajectory[owner]
        low, high = math.log(self.config.low), math.log(self.config.high)
        outside = log_ratio > high if self.config.mode == "truncate" else (log_ratio > high) | (log_ratio < low)
        if self.config.mode == "mask":
            weights = log_ratio.where(~outside, log_ratio.new_full((), -math.inf)).exp()
        else:
            weights = log_ratio.clamp(low if self.config.mode == "clip" else None, high).exp()
        metrics = {"outside": changed_share(outside, mask)}
        if self.config.veto is not None:
            hits = (difference < math.log(self.config.veto)) & mask
            vetoed = mask.new_zeros(len(columns.offsets) - 1)
            vetoed[owner[hits]] = True
            weights = weights.where(~vetoed[owner], weights.new_zeros(()))
            metrics["vetoed_trajectories"] = float(vetoed.sum())
        return Corrected(weights=weights.float(), metrics=metrics)
