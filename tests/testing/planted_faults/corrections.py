"""Faults of corrections."""

from __future__ import annotations

import random

import torch

from miles_core.contracts.objective import Corrected
from miles_core.objective.clip_or_pop import ClipOrPop
from miles_core.objective.mis import Mis
from miles_core.objective.opsm import Opsm
from miles_core.objective.tis import Tis
from planted_faults import scaffolded

Good = scaffolded("corrections")
GOOD = (Good, ClipOrPop, Mis, Opsm, Tis)


class Unbounded(Good):
    """A ratio without a limit."""

    def correct(self, columns, advantages):
        ratio = (columns.old_logprobs - columns.rollout_logprobs).exp()
        return Corrected(weights=ratio, metrics={"mean": 1.0})


class Negative(Good):
    """Punishes disagreement by turning the advantage around."""

    def correct(self, columns, advantages):
        weights = 1 - (columns.old_logprobs - columns.rollout_logprobs).abs()
        return Corrected(weights=weights, metrics={"mean": 1.0})


class Doubles(Good):
    """float64."""

    def correct(self, columns, advantages):
        result = super().correct(columns, advantages)
        return Corrected(weights=result.weights.double(), metrics=result.metrics)


class Random(Good):
    """Drops at random."""

    def correct(self, columns, advantages):
        weights = (torch.rand(len(columns.loss_mask)) > 0.1).float()
        return Corrected(weights=weights, metrics={"dropped": 0.1 * random.random()})


class Always(Good):
    """Halves every token."""

    def correct(self, columns, advantages):
        result = super().correct(columns, advantages)
        return Corrected(weights=result.weights / 2, metrics=result.metrics)


class Silent(Good):
    """Says nothing."""

    def correct(self, columns, advantages):
        return Corrected(weights=super().correct(columns, advantages).weights, metrics={})


class Constant(Good):
    """Always says the same."""

    def correct(self, columns, advantages):
        return Corrected(weights=super().correct(columns, advantages).weights, metrics={"dropped": 0.0})


class ByPlace(Good):
    """Trusts the first half."""

    def correct(self, columns, advantages):
        result = super().correct(columns, advantages)
        first = torch.arange(len(columns.loss_mask)) < len(columns.loss_mask) // 2
        return Corrected(weights=torch.where(first, 1.0, result.weights), metrics=result.metrics)


FAULTS = {
    "weights_are_finite_and_not_negative": (Unbounded, Negative, Doubles),
    "it_is_deterministic": (Random,),
    "agreement_changes_nothing": (Always,),
    "metrics_say_what_changed": (Silent, Constant),
    "order_does_not_matter": (ByPlace,),
}
