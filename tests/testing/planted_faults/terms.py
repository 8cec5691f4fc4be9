"""Faults of loss terms."""

from __future__ import annotations

import dataclasses

from miles_core.contracts.objective import TermLoss
from miles_core.objective.distillation import Distillation
from miles_core.objective.entropy import Entropy
from miles_core.objective.kl import Kl
from miles_core.objective.policy import Policy
from miles_core.objective.supervised import Supervised
from miles_core.objective.value import Value
from planted_faults import scaffolded

Good = scaffolded("loss_terms")
GOOD = (Good, Distillation, Entropy, Kl, Policy, Supervised, Value)


class Scalar(Good):
    """Aggregates by itself."""

    def loss(self, batch):
        return TermLoss(per_token=super().loss(batch).per_token.sum())


class LiveSums(Good):
    """Keeps the graph of what is only reported."""

    def loss(self, batch):
        result = super().loss(batch)
        return dataclasses.replace(result, sums={"loss": result.per_token.sum()})


class VectorSums(Good):
    """Reports one number a token."""

    def loss(self, batch):
        result = super().loss(batch)
        return dataclasses.replace(result, sums={"loss": result.per_token.detach()})


class Detached(Good):
    """Trains nothing."""

    def loss(self, batch):
        return TermLoss(per_token=super().loss(batch).per_token.detach())


class ZeroGradient(Good):
    """Its gradient cancels."""

    def loss(self, batch):
        per_token = super().loss(batch).per_token
        return TermLoss(per_token=per_token - per_token)


class MaskedLate(Good):
    """Masks behind the exponential: 0 · ∞."""

    def loss(self, batch):
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        return TermLoss(per_token=-ratio * batch.advantages * batch.loss_mask)


class CountsAll(Good):
    """Its sum counts tokens that do not train."""

    def loss(self, batch):
        return dataclasses.replace(super().loss(batch), sums={"logprob": batch.logprobs.detach().sum()})


class BatchMean(Good):
    """Centres on the micro-batch."""

    def loss(self, batch):
        per_token = super().loss(batch).per_token
        return TermLoss(per_token=per_token - per_token[batch.loss_mask].mean())


class Means(Good):
    """A mean where a sum is due."""

    def loss(self, batch):
        result = super().loss(batch)
        return dataclasses.replace(result, sums={"logprob": result.per_token.detach().mean()})


class AsksForNothing(Kl):
    """Uses the reference, and does not say so."""

    needs = Good.needs


FAULTS = {
    "it_asks_for_what_it_uses": (AsksForNothing,),
    "one_loss_a_token": (Scalar, LiveSums, VectorSums),
    "gradients_reach_the_tokens_that_train": (Detached, ZeroGradient),
    "what_is_masked_out_is_ignored": (MaskedLate, CountsAll),
    "micro_batches_add_up": (BatchMean, Means),
}
