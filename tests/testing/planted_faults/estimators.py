"""Faults of advantage estimators."""

from __future__ import annotations

import dataclasses

import torch

from miles_core.contracts.objective import Advantages
from miles_core.objective.grpo import Grpo
from miles_core.objective.ppo import Ppo
from planted_faults import scaffolded

Good = scaffolded("advantage_estimators")
GOOD = (Good, Grpo, Ppo)


class Doubles(Good):
    """float64 to the trainer."""

    def estimate(self, columns):
        return Advantages(advantages=super().estimate(columns).advantages.double())


class OneAnEpisode(Good):
    """One advantage an episode."""

    def estimate(self, columns):
        return Advantages(advantages=columns.rewards.float())


class Zero(Good):
    """Nothing is better than anything."""

    def estimate(self, columns):
        return Advantages(advantages=torch.zeros(len(columns.loss_mask)))


class Divides(Good):
    """Divides by a standard deviation of 0."""

    def estimate(self, columns):
        result = super().estimate(columns).advantages
        trains = result[columns.loss_mask]
        return Advantages(advantages=result / trains.std(unbiased=False))


class NoMetric(Good):
    """A mean of nothing in the report."""

    def estimate(self, columns):
        return dataclasses.replace(super().estimate(columns), metrics={"mean": float(columns.rewards.mean())})


class Everywhere(Good):
    """Prompts have advantages too."""

    def estimate(self, columns):
        everywhere = dataclasses.replace(columns, loss_mask=torch.ones_like(columns.loss_mask))
        return super().estimate(everywhere)


class ByPlace(Good):
    """Groups are made of neighbours."""

    def estimate(self, columns):
        place = torch.arange(len(columns.group_of)) // 2
        return super().estimate(dataclasses.replace(columns, group_of=place))


class Averages(Good):
    """Remembers the batch before."""

    baseline = 0.0

    def estimate(self, columns):
        result = super().estimate(columns).advantages
        moved = (result - self.baseline).where(columns.loss_mask, torch.zeros(()))
        self.baseline += 0.1
        return Advantages(advantages=moved)


class InPlace(Good):
    """Centres the batch's own rewards."""

    def estimate(self, columns):
        columns.rewards.sub_(columns.rewards.mean()) if len(columns.rewards) else None
        return super().estimate(columns)


FAULTS = {
    "advantages_are_float32_one_a_token": (Doubles, OneAnEpisode, Zero),
    "degenerate_groups_are_finite": (Divides, NoMetric),
    "nothing_outside_the_mask": (Everywhere,),
    "order_does_not_matter": (ByPlace,),
    "it_is_pure": (Averages, InPlace),
}
