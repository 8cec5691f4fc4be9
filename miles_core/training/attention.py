"""Attention over a packed micro-batch: every trajectory sees its own tokens, and nothing else.

Registered with transformers under `PACKED_ATTENTION`, so any model that goes through its attention interface runs
packed without a change to its code. The spans of the layout arrive as the keyword argument `packing`.

Segments of one shape are one call of `scaled_dot_product_attention`, each on exactly its own keys: there is no mask
between trajectories to get wrong, and another trajectory's values cannot change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from miles_core.training.layout import Span

__all__ = ["PACKED_ATTENTION", "Packing", "packed_attention"]

PACKED_ATTENTION = "miles_packed"


class Packing:
    """The spans of one micro-batch with the index tensors and masks that attention needs, built once for all layers.

    `calls` counts the layers that attended through it: a layer that does not would mix trajectories.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = tuple(spans)
        self.calls = 0
        self.sizes = [span.count * span.length for span in spans]
        self.prefix_sizes = [span.count * span.prefix for span in spans]
        prefixes = [torch.from_numpy(span.prefix_rows).flatten() for span in spans]
        self.prefix_rows = torch.cat(prefixes).to(device) if sum(self.prefix_sizes) else None
        self.masks = [
            torch.ones(span.length, span.prefix + span.length, dtype=torch.bool, device=device).tril(span.prefix)
            if span.prefix and span.length > 1
            else None
            for span in spans
        ]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    packing: Packing,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each segment to its path in the prefix tree and to itself.

    `query` [1, H, L, D], `key` and `value` [1, K, L, D] with H a multiple of K. Returns [1, L, H, D]. Raises
    `ValueError` for what it does not compute (sliding windows that bite, soft caps, dropout).
    """
    _refuse_variants(packing, sliding_window, dropout, kwargs)
    packing.calls += 1
    grouped = query.shape[1] != key.shape[1]
    queries = torch.split(query[0].transpose(0, 1), packing.sizes)  # each [count · length, H, D]
    keys, values = (x[0].transpose(0, 1) for x in (key, value))
    own_keys, own_values = torch.split(keys, packing.sizes), torch.split(values, packing.sizes)
    before_keys, before_values = (_paths(x, packing) for x in (keys, values))
    outputs = []
    for i, span in enumerate(packing.spans):
        q, k, v = (_by_segment(x[i], span.count) for x in (queries, own_keys, own_values))
        if span.prefix:
            before = (_by_segment(x[i], span.count) for x in (before_keys, before_values))
            k, v = (torch.cat(pair, dim=1) for pair in zip(before, (k, v), strict=True))
        attended = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=packing.masks[i],
            is_causal=not span.prefix and span.length > 1,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0), None


def _by_segment(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[count · length, heads, D] to [count, length, heads, D]."""
    return rows.reshape(count, rows.shape[0] // count, *rows.shape[1:])


def _paths(rows: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, ...]:
    """For each span the keys or values of its segments' paths, [count · prefix, K, D]."""
    if packing.prefix_rows is None:
        return ()
    return torch.split(rows.index_select(0, packing.prefix_rows), packing.prefix_sizes)


def _refuse_variants(packing: Packing, window: int | None, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"attention dropout is {dropout}: packed attention computes none; set attention_dropout = 0")
    if window is not None and any(span.prefix + span.length > window for span in packing.spans):
        raise ValueError(f"a trajectory is longer than the model's sliding window of {window}: not supported packed")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"the model's attention uses {name}, which packed attention does not compute")


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
