"""FSDP2: a scorer's parameters, gradients and optimizer state in equal shards over the ranks (arXiv 2304.11277)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miles_core.training.ranks import Ranks
from miles_core.training.scorer import Scorer

__all__ = ["gathered", "is_sharded", "own_part", "shard"]


def shard(scorer: Scorer, ranks: Ranks, device: torch.device) -> None:
    """Shard in place, one unit a transformer block and one for the rest.

    Gradients are *summed* over ranks: the objective's weights are those of the global batch already.
    """
    mesh = init_device_mesh(device.type, (ranks.size,))
    low = scorer.compute_dtype if scorer.compute_dtype == torch.bfloat16 else None
    # Sums over ranks are in the dtype of the masters.
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    blocks = set(scorer.model._no_split_modules)
    for module in scorer.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    scorer.sharded = True


def is_sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether other ranks hold the rest of these."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without copying."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Any) -> torch.Tensor:
    """The whole tensor, detached; all ranks take part."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()
