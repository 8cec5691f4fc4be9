"""Faults of precision contracts."""

from __future__ import annotations

import itertools

import torch

from planted_faults import scaffolded

Good = scaffolded("precision_contracts")
GOOD = (Good,)


class Wavering(Good):
    """Excludes every other time."""

    def __init__(self, config):
        super().__init__(config)
        self.count = itertools.count()

    def excluded(self, name):
        return next(self.count) % 2 == 0


class Truthy(Good):
    """A match for a yes."""

    def excluded(self, name):
        return [part for part in self.config.exclude if part in name]


class QuantisesAll(Good):
    """Its exclusion list is for show."""

    def quantize(self, name, weight):
        return {name: weight.float()} if self.excluded(name) else super().quantize(name, weight)


class Stochastic(Good):
    """Rounds at random."""

    def quantize(self, name, weight):
        noise = 0.001 * torch.rand(weight.shape) if weight.ndim == 2 else 0
        return super().quantize(name, (weight.float() + noise).to(weight.dtype))


class InPlace(Good):
    """Rounds its input."""

    def quantize(self, name, weight):
        weight.mul_(1.5)
        return super().quantize(name, weight / 1.5)


class LooseScales(Good):
    """Its scale is taken from the largest weight, over 100: quantising again gives other numbers."""

    def quantize(self, name, weight):
        if self.excluded(name):
            return {name: weight}
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 100.7
        return {name: (weight.float() / scale).round().to(torch.int8), f"{name}_scale": scale}


class OtherDtype(Good):
    """Comes back as float32."""

    def dequantize(self, name, tensors):
        return super().dequantize(name, tensors).float()


class ForgetsScales(Good):
    """The numbers without their scale."""

    def dequantize(self, name, tensors):
        if self.excluded(name):
            return tensors[name]
        return tensors[name].to(torch.bfloat16)


class ConfigObjects(Good):
    """A dtype is no JSON."""

    def checkpoint_config(self):
        return {"dtype": torch.int8}


class Tuples(Good):
    """Tuples come back as lists."""

    def checkpoint_config(self):
        return {"ignore": ("lm_head",)}


FAULTS = {
    "exclusion_is_a_function_of_the_name": (Wavering, Truthy),
    "excluded_weights_stay_as_they_are": (QuantisesAll,),
    "quantize_is_deterministic_to_the_byte": (Stochastic, InPlace),
    "the_round_trip_is_stable": (LooseScales, OtherDtype),
    "the_round_trip_is_near": (ForgetsScales,),
    "checkpoint_config_is_json": (ConfigObjects, Tuples),
}
