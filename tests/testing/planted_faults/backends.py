"""Faults of train backends, on the core's."""

from __future__ import annotations

import dataclasses

import numpy as np

from miles_core.errors import NumericsError
from miles_core.training.fsdp import FsdpBackend
from planted_faults import scaffolded

Good = scaffolded("train_backends")
GOOD = (Good,)


class Doubles(FsdpBackend):
    """float64 log-probs."""

    def logprobs(self, trajectories):
        return [column.astype(np.float64) for column in super().logprobs(trajectories)]


class Shifted(FsdpBackend):
    """One position off."""

    def logprobs(self, trajectories):
        return [column[1:] for column in super().logprobs(trajectories)]


class Rotated(FsdpBackend):
    """The last one first."""

    def logprobs(self, trajectories):
        return [np.roll(column, 1) for column in super().logprobs(trajectories)]


class Probabilities(FsdpBackend):
    """Probabilities for their logarithms."""

    def logprobs(self, trajectories):
        return [np.exp(column) * (column != 0) for column in super().logprobs(trajectories)]


class Frozen(FsdpBackend):
    """Takes its step back."""

    def train_step(self, batch, objective):
        kept = {name: tensor.clone() for name, tensor in self.named_weights()}
        report = super().train_step(batch, objective)
        for name, tensor in self.named_weights():
            tensor.copy_(kept[name])
        return report


class CountsFromZero(FsdpBackend):
    """The first step is step 0."""

    def train_step(self, batch, objective):
        report = super().train_step(batch, objective)
        return dataclasses.replace(report, step=report.step - 1)


class NotFinite(FsdpBackend):
    """A metric is NaN."""

    def train_step(self, batch, objective):
        report = super().train_step(batch, objective)
        return dataclasses.replace(report, metrics={"ratio": float("nan")})


class Uphill(FsdpBackend):
    """Steps the wrong way."""

    def train_step(self, batch, objective):
        kept = {name: tensor.clone() for name, tensor in self.named_weights()}
        report = super().train_step(batch, objective)
        for name, tensor in self.named_weights():
            tensor.copy_(kept[name] - 1000 * (tensor - kept[name]))
        return report


class ForgetsOptimizer(FsdpBackend):
    """A checkpoint of weights alone."""

    def load(self, directory):
        super().load(directory)
        self.trainer.optimizer.state.clear()


class ForgetsStep(FsdpBackend):
    """Counts from the start again."""

    def load(self, directory):
        super().load(directory)
        self.trainer.step = 0


class TrainsOnNan(FsdpBackend):
    """A step that fails is a step of nothing."""

    def train_step(self, batch, objective):
        try:
            return super().train_step(batch, objective)
        except NumericsError:
            return super().train_step(batch, dataclasses.replace(objective, factor=1.0))


class MovesFirst(FsdpBackend):
    """Moves, then looks."""

    def train_step(self, batch, objective):
        try:
            return super().train_step(batch, objective)
        except NumericsError:
            super().train_step(batch, dataclasses.replace(objective, factor=1.0))
            raise


class KeepsGradients(FsdpBackend):
    """A refused step leaves its trace in the optimizer."""

    def train_step(self, batch, objective):
        try:
            return super().train_step(batch, objective)
        except NumericsError:
            for state in self.trainer.optimizer.state.values():
                state["exp_avg"].add_(1.0)
            raise


class OwnNames(FsdpBackend):
    """Streams its own module's names."""

    def named_weights(self):
        return ((f"module.{name}", tensor) for name, tensor in super().named_weights())


class Twice(FsdpBackend):
    """Streams tied weights twice."""

    def named_weights(self):
        yield from super().named_weights()
        yield next(iter(super().named_weights()))


class Unsorted(FsdpBackend):
    """Another order after each step."""

    def named_weights(self):
        found = list(super().named_weights())
        return reversed(found) if self.trainer.step else found


class ExportsTheStart(FsdpBackend):
    """Exports what the run started from."""

    def export(self, directory):
        other = FsdpBackend(self.config)
        other.start(self.trainer.start)
        other.export(directory)


class LogprobsTrain(FsdpBackend):
    """Looking moves the weights."""

    def logprobs(self, trajectories):
        for _, tensor in self.named_weights():
            tensor.mul_(1.01)
        return super().logprobs(trajectories)


FAULTS = {
    "logprobs_are_of_every_token": (Doubles, Shifted, Rotated, Probabilities, LogprobsTrain),
    "a_step_moves_the_weights": (Frozen, CountsFromZero, NotFinite),
    "a_step_goes_downhill": (Uphill,),
    "save_and_load_continue_to_the_bit": (ForgetsOptimizer, ForgetsStep),
    "nan_is_refused_before_anything_moves": (TrainsOnNan, MovesFirst, KeepsGradients),
    "weights_have_their_checkpoint_names": (OwnNames, Twice, Unsorted),
    "export_is_the_model": (ExportsTheStart,),
}
