"""How per-token losses become one number: a factor for every token, computed once for the global batch.

The loss is Σ_t factor_t · loss_t, so micro-batches, packing order and data-parallel layout cannot change it.

| kind | factor of a trainable token | source |
|---|---|---|
| `token` | 1 / trainable tokens of the batch | DAPO, arXiv 2503.14476 |
| `sequence` | 1 / (its episode's trainable tokens · episodes that train) | GRPO, arXiv 2402.03300 |
| `constant` | 1 / (`constant_length` · episodes that train) | Dr. GRPO, arXiv 2503.20783 |

What is masked is in no denominator: a batch weighs the same with or without its all-masked episodes. A token of
weight w (`BatchColumns.weights`) is w of a token, above and below the line: Σ w·l / Σ w, of which the mask is the case
of w in {0, 1}. So what counts less makes the rest count no less. `constant` has a denominator that no token is in;
there w stands above the line alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from miles_core.objective.columns import token_episode

if TYPE_CHECKING:
    import torch

    from miles_core.contracts.objective import BatchColumns

__all__ = ["Aggregation", "token_weights"]

Aggregation = Literal["token", "sequence", "constant"]


def token_weights(columns: BatchColumns, kind: Aggregation, *, constant_length: int = 0) -> torch.Tensor:
    """float64 [N], 0 outside the mask. All 0 when nothing trains."""
    mask = columns.loss_mask.double()
    if columns.weights is not None:
        mask = mask * columns.weights.double()
    if kind == "token":
        return mask / _or_one(mask.sum())
    owner = token_episode(columns)
    counts = mask.new_zeros(len(columns.rewards)).index_add(0, owner, mask)
    training = _or_one((counts > 0).double().sum())
    if kind == "sequence":
        return mask / (_or_one(counts)[owner] * training)
    if constant_length < 1:
        raise ValueError(f"aggregation 'constant' needs constant_length of at least 1 token, got {constant_length}")
    return mask / (constant_length * training)


def _or_one(denominators: torch.Tensor) -> torch.Tensor:
    """Where nothing counts the sum above the line is 0, and so is the quotient."""
    return denominators.where(denominators > 0, denominators.new_ones(()))
