"""Supervised fine-tuning: negative log-likelihood of the trainable tokens."""

from __future__ import annotations

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import LossTerm, MicroBatch, TermLoss

__all__ = ["Supervised"]


class Supervised(LossTerm[ComponentConfig]):
    """A sample without trainable tokens contributes nothing, and is in no denominator."""

    def loss(self, batch: MicroBatch) -> TermLoss:
        loss = -batch.logprobs.where(batch.loss_mask, batch.logprobs.new_zeros(()))
        return TermLoss(per_token=loss, sums={"nll": loss.detach().double().sum()})
