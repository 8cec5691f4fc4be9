"""A module that brings torch into every process that imports it."""

from __future__ import annotations

import torch

from planted_faults import scaffolded


class HeavyReward(scaffolded("rewards")):
    """Its device is looked up too early."""

    device = torch.device("cpu")
