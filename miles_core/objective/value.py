"""The critic's loss, clipped around the old value (PPO implementation, arXiv 2005.12729)."""

from __future__ import annotations

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import LossTerm, MicroBatch, Needs, TermLoss

__all__ = ["Value", "ValueConfig"]


class ValueConfig(ComponentConfig):
    """Section of the `value` term."""

    clip: float | None = Field(default=0.2, gt=0)
    """A value may move this far from the old one before its gradient stops. None: no clipping."""


class Value(LossTerm[ValueConfig]):
    """½ max((V − G)², (clip(V) − G)²)."""

    Config = ValueConfig
    needs = Needs.VALUES

    def loss(self, batch: MicroBatch) -> TermLoss:
        assert batch.values is not None
        assert batch.returns is not None
        mask, zero = batch.loss_mask, batch.values.new_zeros(())
        values, returns = batch.values.where(mask, zero), batch.returns.to(zero.dtype).where(mask, zero)
        error = (values - returns).square()
        sums = {"error": error.detach().double().sum()}
        if self.config.clip is not None:
            assert batch.old_values is not None
            old = batch.old_values.to(zero.dtype).where(mask, zero)
            limited = old + (values - old).clamp(-self.config.clip, self.config.clip)
            clipped = (limited - returns).square()
            sums["clipped"] = (clipped > error).detach().double().sum()
            error = error.maximum(clipped)
        return TermLoss(per_token=error / 2, sums=sums)
