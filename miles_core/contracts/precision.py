"""Precision contracts: one quantizer object and one exclusion list, used in all four stages."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_core.contracts.component import Component, ConfigT

if TYPE_CHECKING:
    import torch

__all__ = ["PrecisionContract"]


class PrecisionContract(Component[ConfigT], abc.ABC):
    """How weights are written, in checkpoint conversion, trainer forward, rollout engine and live export alike."""

    @abc.abstractmethod
    def excluded(self, name: str) -> bool:
        """True for a checkpoint tensor that stays in the model's own dtype."""

    @abc.abstractmethod
    def quantize(self, name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The checkpoint tensors that stand for `weight` [N, K], by name; an excluded one stands for itself.
        Deterministic to the byte."""

    @abc.abstractmethod
    def dequantize(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight that the stored tensors mean, in the model's dtype."""

    @abc.abstractmethod
    def checkpoint_config(self) -> Mapping[str, Any]:
        """What stands under `quantization_config` in the checkpoint's config.json; empty for none."""
