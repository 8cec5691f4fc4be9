"""Log-probs and entropies of chosen tokens from hidden states, without ever holding all the logits.

Logits exist for `chunk` rows at a time, in the forward and again in the backward pass, so peak memory does not grow
with rows × vocabulary. A row that predicts several tokens (the last row of a shared prompt) is multiplied once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["CHUNK", "token_logprobs"]

CHUNK = 256
"""Rows whose logits exist at one time."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    bias: torch.Tensor | None = None,
    entropy: bool = False,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(hidden · weightᵀ / temperature) at `targets`, and the entropy of the same distribution.

    `hidden` [L, D]; `weight` [V, D]; `rows` int64 [m] the row that predicts each token; `targets` int64 [m]. Returns
    float32 [m] each, natural log, the entropy None unless asked for. Differentiable in hidden, weight and bias. The
    softmax is in float32 also where the product is in less (float64 stays what it is).
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: log-probs need a sampling temperature above 0")
    unique, inverse = torch.unique(rows, return_inverse=True)
    logprobs, row_entropy = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden.index_select(0, unique), weight, bias, inverse, targets, temperature, entropy, chunk
    )
    return logprobs, row_entropy.index_select(0, inverse) if entropy else None


class _Scores(torch.autograd.Function):
    """hidden [U, D], weight [V, D], row_of [m], targets [m] → log-probs [m], entropy [U] (empty when not asked)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        row_of: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        want_entropy: bool,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.argsort(row_of, stable=True)
        bounds = _bounds(row_of, order, hidden.shape[0], chunk)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=dtype)
        entropy = hidden.new_empty(hidden.shape[0] if want_entropy else 0, dtype=dtype)
        for start, stop, first, last in bounds:
            scores = _scores(hidden[start:stop], weight, bias, temperature)
            tokens = order[first:last]
            logprobs[tokens] = scores[row_of[tokens] - start, targets[tokens]]
            if want_entropy:
                entropy[start:stop] = -(scores.exp() * scores).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, row_of, targets, order, entropy)
        ctx.temperature, ctx.bounds, ctx.want_entropy = temperature, bounds, want_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, row_of, targets, order, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None else None
        for start, stop, first, last in ctx.bounds:
            scores = _scores(hidden[start:stop], weight, bias, ctx.temperature)
            tokens = order[first:last]
            local = row_of[tokens] - start
            upstream = grad_logprobs[tokens]
            per_row = upstream.new_zeros(stop - start)
            per_row.index_add_(0, local, upstream)
            probs = scores.exp()
            # d logprob / d logits = onehot − p;  d entropy / d logits = −p (log p + H)
            grad = probs * -per_row[:, None]
            if ctx.want_entropy:
                rows = slice(start, stop)
                grad -= probs * (scores + entropy[rows, None]) * grad_entropy[rows, None]
            grad.index_put_((local, targets[tokens]), upstream, accumulate=True)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[start:stop] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[start:stop])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """Log-probs of the whole vocabulary at the sampling temperature, float32 or float64 [rows, V]."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature).log_softmax(-1)


def _bounds(row_of: torch.Tensor, order: torch.Tensor, rows: int, chunk: int) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first token, end token) of each chunk; tokens in row order."""
    edges = torch.arange(0, rows + chunk, chunk, device=row_of.device).clamp_(max=rows)
    splits = torch.searchsorted(row_of[order].contiguous(), edges)
    starts, tokens = edges.tolist(), splits.tolist()
    return [
        (starts[i], starts[i + 1], tokens[i], tokens[i + 1])
        for i in range(len(starts) - 1)
        if starts[i] < starts[i + 1]
    ]
