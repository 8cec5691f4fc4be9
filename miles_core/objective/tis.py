"""Truncated importance sampling between trainer and rollout (fengyao.notion.site/off-policy-rl, 2025)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import BatchColumns, Corrected, Correction

if TYPE_CHECKING:
    import torch

__all__ = ["Tis", "TisConfig", "changed_share", "mismatch"]


def mismatch(columns: BatchColumns) -> torch.Tensor:
    """log π_train − log π_rollout, float64 [N], 0 outside the mask. π_train is the trainer before the step."""
    assert columns.old_logprobs is not None
    difference = columns.old_logprobs.double() - columns.rollout_logprobs.double()
    return difference.where(columns.loss_mask, difference.new_zeros(()))


def changed_share(changed: torch.Tensor, mask: torch.Tensor) -> float:
    """Share of the trainable tokens that are `changed`; 0 when nothing trains."""
    return float((changed & mask).sum()) / max(int(mask.sum()), 1)


class TisConfig(ComponentConfig):
    """Section of `tis`."""

    low: float = Field(default=0.0, ge=0)
    """Lower bound of π_train / π_rollout."""

    high: float = Field(default=2.0, gt=0)
    """Upper bound."""

    @model_validator(mode="after")
    def _ordered(self) -> TisConfig:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


class Tis(Correction[TisConfig]):
    """Weight of a token: its ratio, clamped to [low, high]."""

    Config = TisConfig

    def correct(self, columns: BatchColumns, advantages: torch.Tensor) -> Corrected:
        difference = mismatch(columns)
        bounds = (math.log(self.config.low) if self.config.low else -math.inf, math.log(self.config.high))
        weights = difference.clamp(*bounds).exp()
        mask = columns.loss_mask
        return Corrected(
            weights=weights.float(),
            metrics={
                "truncated_high": changed_share(difference > bounds[1], mask),
                "truncated_low": changed_share(difference < bounds[0], mask),
                "weight_mean": float(weights[mask].mean()) if bool(mask.any()) else 1.0,
            },
        )
