"""AdamW, gradient clipping and sums over parameters that may be shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from miles_core.training.ranks import Ranks
from miles_core.training.settings import FsdpConfig
from miles_core.training.sharding import is_sharded, own_part

__all__ = ["adamw", "clip", "gradients_of", "sum_gradients"]


def adamw(parameters: Sequence[torch.nn.Parameter], config: FsdpConfig, rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves vectors alone."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def gradients_of(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's parts of the gradients."""
    return [own_part(p.grad) for p in parameters if p.grad is not None]


def sum_gradients(parameters: Sequence[torch.nn.Parameter], ranks: Ranks) -> None:
    """Whole gradients, summed over ranks that each computed a part of the batch. One that no rank has stays None."""
    had = ranks.sum(torch.tensor([int(p.grad is not None) for p in parameters]))
    for parameter, somewhere in zip(parameters, had.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            ranks.sum(parameter.grad)


def clip(parameters: Sequence[torch.nn.Parameter], limit: float, ranks: Ranks) -> float:
    """The norm of the whole gradient, over all ranks; above `limit`, gradients are scaled down to it."""
    gradients = gradients_of(parameters)
    norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
    if is_sharded(parameters):
        norm = math.sqrt(float(ranks.sum(torch.tensor(norm, dtype=torch.float64).square())))
    if norm > limit and math.isfinite(norm):
        torch._foreach_mul_(gradients, limit / norm)
    return norm
