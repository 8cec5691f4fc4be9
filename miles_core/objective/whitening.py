"""Whitening over the trainable tokens of the global batch, whatever the layout of ranks and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["whiten"]


def whiten(values: torch.Tensor, mask: torch.Tensor, *, epsilon: float = 1e-8) -> torch.Tensor:
    """(x − mean) / sqrt(var + epsilon) over the masked values, var unbiased, float64; 0 outside the mask.

    One value alone, or equal values, give 0.
    """
    kept = values.double()[mask]
    out = values.new_zeros(len(values)).double()
    if len(kept) < 2:
        return out
    out[mask] = (kept - kept.mean()) / (kept.var() + epsilon).sqrt()
    return out
