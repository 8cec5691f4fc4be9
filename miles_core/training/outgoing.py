"""What leaves the trainer for the engines: weights in the dtype that they run in, seen by the engine's witness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.backends import WeightStream
    from miles_core.contracts.engines import WeightWitness

__all__ = ["in_dtype", "seen_by"]


def in_dtype(weights: WeightStream, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point tensors in `dtype` (`float32`, `bfloat16`), rounded to nearest even; others as they are."""
    import torch

    target: torch.dtype = getattr(torch, dtype)
    for name, tensor in weights:
        yield name, tensor.to(target) if tensor.is_floating_point() else tensor


def seen_by(witness: WeightWitness, weights: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
    """The same stream; the witness sees every tensor on its way."""
    for name, tensor in weights:
        witness.see(name, tensor)
        yield name, tensor
