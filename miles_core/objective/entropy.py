"""Entropy bonus (A3C, arXiv 1602.01783): minus the next-token entropy, at the sampling temperature."""

from __future__ import annotations

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import LossTerm, MicroBatch, Needs, TermLoss

__all__ = ["Entropy"]


class Entropy(LossTerm[ComponentConfig]):
    """A positive coefficient keeps the policy from collapsing."""

    needs = Needs.ENTROPY

    def loss(self, batch: MicroBatch) -> TermLoss:
        assert batch.entropy is not None
        entropy = batch.entropy.where(batch.loss_mask, batch.entropy.new_zeros(()))
        return TermLoss(per_token=-entropy, sums={"entropy": entropy.detach().double().sum()})
