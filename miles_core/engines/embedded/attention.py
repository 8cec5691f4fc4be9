"""Attention over a packed step, registered with transformers as ``miles_embedded``.

The model runs on one sequence [1, T] that holds every token of the step, so that its linear layers see one
large matrix. Only attention knows which token belongs to whom: the first B tokens are the next token of rows
0 to B - 1, and are one batched attention over those rows; behind them come longer segments, one attention each.

Shapes: T tokens, B rows, H query heads, K key heads, D head dimension, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from .kv_pool import KVPool, LayerCache

NAME = "miles_embedded"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A longer segment: packed tokens ``start`` to ``stop``, whose sequence lies in ``slots`` up to there."""

    start: int
    stop: int
    slots: torch.Tensor

    @property
    def prefix(self) -> int:
        """Tokens of the sequence before this segment."""
        return len(self.slots) - (self.stop - self.start)


@dataclass(kw_only=True)
class PackedStep:
    """What attention needs to know of a step, on the model's device."""

    pool: KVPool
    slots: torch.Tensor
    """[T], where each token's key and value go."""
    decode_positions: torch.Tensor
    """[B], position of each row's token in its sequence."""
    longest: int
    """Keys of the longest row, its new token included."""
    spans: list[Span]
    fresh: list[tuple[int, torch.Tensor]]
    """(row, slots) of sequences to copy into their row."""
    _masks: dict[tuple[int | None, int | None], torch.Tensor | None] = field(default_factory=dict)

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the additive mask [B, 1, 1, S] of the rows, None when all of them see all keys."""
        key = (None, window)
        if key not in self._masks:
            last = self.decode_positions[:, None]
            keys = torch.arange(self.longest, device=last.device)
            seen = keys <= last
            if window is not None:
                seen &= keys > last - window
            self._masks[key] = None if bool(seen.all()) else _additive(seen, dtype)[:, None, None, :]
        return self._masks[key]

    def span_mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive causal mask [tokens, S] of a span."""
        key = (index, window)
        if key not in self._masks:
            span = self.spans[index]
            keys = torch.arange(len(span.slots), device=span.slots.device)
            queries = keys[span.prefix :, None]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self._masks[key] = _additive(seen, dtype)
        mask = self._masks[key]
        assert mask is not None
        return mask


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_step: PackedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] to [1, T, H, D].

    Raises:
        ValueError: the model wants sinks, soft capping or a bias, which this function does not compute.
    """
    for option in ("s_aux", "softcap", "position_bias"):
        if options.get(option) is not None:
            raise ValueError(
                f"the embedded engine does not compute attention with {option} ({type(module).__name__}); "
                "serve this model with SGLang"
            )
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    layer = packed_step.pool.layer(layer_index, keys, values)
    layer.write(packed_step.slots, keys, values)
    layer.load_rows(packed_step.fresh)
    parts = []
    if count := len(packed_step.decode_positions):
        layer.append(packed_step.decode_positions, keys[:count], values[:count])
        parts.append(_decode(query[0, :, :count].transpose(0, 1), layer, packed_step, scaling, sliding_window))
    for index, span in enumerate(packed_step.spans):
        query_span = query[:, :, span.start : span.stop]
        grouped = query.shape[1] != key.shape[1]
        if span.prefix == 0 and (sliding_window is None or span.stop - span.start <= sliding_window):
            key_span, value_span = key[:, :, span.start : span.stop], value[:, :, span.start : span.stop]
            out = scaled_dot_product_attention(
                query_span, key_span, value_span, is_causal=True, scale=scaling, enable_gqa=grouped
            )
        else:
            key_span, value_span = layer.read(span.slots)
            mask = packed_step.span_mask(index, sliding_window, query.dtype)
            out = scaled_dot_product_attention(
                query_span, key_span, value_span, attn_mask=mask, scale=scaling, enable_gqa=grouped
            )
        parts.append(out[0].transpose(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _decode(
    query: torch.Tensor, layer: LayerCache, step: PackedStep, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attend one token of each row to that row; the query heads of one key head are its batch's "tokens"."""
    rows, heads, _ = query.shape
    key, value = (tensor[:rows, :, : step.longest] for tensor in layer.rows)
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], -1)
    out = scaled_dot_product_attention(
        grouped, key, value, attn_mask=step.decode_mask(window, query.dtype), scale=scaling
    )
    return out.reshape(rows, heads, -1)


AttentionInterface.register(NAME, packed_attention)
