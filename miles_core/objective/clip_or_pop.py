"""Importance weights inside [low, high]; a token outside is dropped (IcePop, ringtech.notion.site/icepop, 2025)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import BatchColumns, Corrected, Correction
from miles_core.objective.tis import changed_share, mismatch

if TYPE_CHECKING:
    import torch

__all__ = ["ClipOrPop", "ClipOrPopConfig"]


class ClipOrPopConfig(ComponentConfig):
    """Section of `clip_or_pop`."""

    low: float = Field(default=0.5, gt=0)
    """Smallest π_train / π_rollout that still trains."""

    high: float = Field(default=5.0, gt=0)
    """Largest one."""

    @model_validator(mode="after")
    def _ordered(self) -> ClipOrPopConfig:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


class ClipOrPop(Correction[ClipOrPopConfig]):
    """Weight of a token: its ratio, or 0 outside [low, high]. It stays in the aggregation's denominator."""

    Config = ClipOrPopConfig

    def correct(self, columns: BatchColumns, advantages: torch.Tensor) -> Corrected:
        difference = mismatch(columns)
        inside = (difference >= math.log(self.config.low)) & (difference <= math.log(self.config.high))
        weights = difference.where(inside, difference.new_full((), -math.inf)).exp()
        return Corrected(weights=weights.float(), metrics={"popped": changed_share(~inside, columns.loss_mask)})
