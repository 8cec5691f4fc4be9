"""How per-token losses become one number: a weight for every token, computed once for the global batch.

The loss is Σ_t weight_t · loss_t, so micro-batches, packing order and data-parallel layout cannot change it.

| kind | weight of a trainable token | source |
|---|---|---|
| `token` | 1 / trainable tokens of the batch | DAPO, arXiv 2503.14476 |
| `sequence` | 1 / (its episode's trainable tokens · episodes that train) | GRPO, arXiv 2402.03300 |
| `constant` | 1 / (`constant_length` · episodes that train) | Dr. GRPO, arXiv 2503.20783 |

What is masked is in no denominator: a batch weighs the same with or without its all-masked episodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from miles_core.objective.columns import episode_token_counts, token_episode

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.objective import BatchColumns

__all__ = ["Aggregation", "token_weights"]

Aggregation = Literal["token", "sequence", "constant"]


def token_weights(columns: BatchColumns, kind: Aggregation, *, constant_length: int = 0) -> torch.Tensor:
    """float64 [N], 0 outside the mask. All 0 when nothing trains."""
    mask = columns.loss_mask.double()
    if kind == "token":
        return mask / mask.sum().clamp(min=1)
    counts = episode_token_counts(columns).double()
    training = (counts > 0).double().sum().clamp(min=1)
    if kind == "sequence":
        return mask / (counts.clamp(min=1)[token_episode(columns)] * training)
    if constant_length < 1:
        raise ValueError(f"aggregation 'constant' needs constant_length of at least 1 token, got {constant_length}")
    return mask / (constant_length * training)
