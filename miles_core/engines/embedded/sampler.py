"""Logits to tokens and log-probabilities, for a batch of sequences with their own parameters.

A token is the inverse of the cumulative distribution at one uniform number, which is a pure function of the
request's seed and the token's place in the output. So a request's tokens depend neither on its neighbours in
the batch nor on whether it was interrupted.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .protocol import SamplingParams

_BLOCK = 256
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How one sequence's next token is drawn."""

    params: SamplingParams
    index: int
    """How many tokens the request has sampled before."""

    @property
    def banned(self) -> frozenset[int]:
        """Ids that must not be drawn yet."""
        return self.params.stop_token_ids if self.index < self.params.min_new_tokens else frozenset()


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A batch of tokens [B]. ``logprobs`` are at each sequence's sampling temperature."""

    tokens: list[int]
    logprobs: list[float]
    logprobs_original: list[float]
    scaled: torch.Tensor
    normalizer: torch.Tensor

    def row_logprobs(self, row: int) -> torch.Tensor:
        """Return the log-probs [V] of one sequence at its sampling temperature."""
        return self.scaled[row] - self.normalizer[row]


def uniform(seed: int, index: int) -> float:
    """Return number ``index`` of stream ``seed``, in [0, 1): SplitMix64 (Steele et al., OOPSLA 2014), by counter."""
    state = _mix(seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    return (_mix(state) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> Sampled:
    """Draw one token a sequence.

    Log-probs are those of the distribution before top-k, top-p, min-p and banned ids cut it, at the sampling
    temperature; at temperature 1 for greedy sequences and in ``logprobs_original``.

    Raises:
        FloatingPointError: the logits of a sequence hold NaN or no finite maximum.
    """
    logits = logits.float()
    temperatures = [draw.params.temperature or 1.0 for draw in draws]
    tempered = any(temperature != 1.0 for temperature in temperatures)
    scaled = logits / logits.new_tensor(temperatures)[:, None] if tempered else logits
    normalizer = scaled.logsumexp(-1)
    if not bool(normalizer.isfinite().all()):
        bad = [row for row, finite in enumerate(normalizer.isfinite().tolist()) if not finite]
        raise FloatingPointError(f"the model's logits are not finite (sequences {bad} of the batch)")
    greedy: list[int] = []
    cut: list[int] = []
    plain: list[int] = []
    for row, draw in enumerate(draws):
        kind = greedy if draw.params.temperature == 0.0 else cut if draw.params.truncated or draw.banned else plain
        kind.append(row)
    tokens = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    uniforms = torch.tensor([uniform(draw.params.sampling_seed, draw.index) for draw in draws], dtype=torch.float64).to(
        logits.device
    )
    if plain:
        whole = len(plain) == len(draws)
        rows = torch.tensor(plain, device=tokens.device)
        probs = (scaled - normalizer[:, None] if whole else scaled[rows] - normalizer[rows, None]).exp_()
        tokens[rows] = _invert(probs, uniforms[rows])
    if cut:
        rows = torch.tensor(cut, device=tokens.device)
        tokens[rows] = _draw_cut(scaled[rows], uniforms[rows], [draws[row] for row in cut])
    for row in greedy:
        allowed = logits[row]
        if draws[row].banned:
            allowed = allowed.clone()
            allowed[sorted(draws[row].banned)] = float("-inf")
        tokens[row] = allowed.argmax()
    logprobs = scaled.gather(1, tokens[:, None])[:, 0] - normalizer
    original = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1) if tempered else logprobs
    return Sampled(
        tokens=tokens.tolist(),
        logprobs=logprobs.tolist(),
        logprobs_original=original.tolist(),
        scaled=scaled,
        normalizer=normalizer,
    )


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return for each row the index whose share of the cumulated weights holds the uniform number.

    Two levels, so that only block sums and one block a row are cumulated in float64.
    """
    rows, vocabulary = weights.shape
    blocks = -(-vocabulary // _BLOCK)
    padded = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - vocabulary))
    padded = padded.reshape(rows, blocks, _BLOCK)
    block_cdf = padded.sum(-1).double().cumsum(-1)
    target = (uniforms * block_cdf[:, -1])[:, None]
    block = torch.searchsorted(block_cdf, target, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp_(min=0)), 0.0)
    chosen = padded[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(-1)
    # Sums in another order differ by rounding: stay strictly below the block's own total.
    inside = torch.minimum(target - before, chosen[:, -1:] * (1 - 1e-12))
    return (block * _BLOCK + torch.searchsorted(chosen, inside, right=True))[:, 0]


def _draw_cut(scaled: torch.Tensor, uniforms: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw from what banned ids, top-k, top-p and min-p leave (all three judged on the same probabilities)."""
    for row, draw in enumerate(draws):
        if draw.banned:
            scaled[row, sorted(draw.banned)] = float("-inf")
    ordered, ids = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    params = [draw.params for draw in draws]
    vocabulary = scaled.shape[-1]
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocabulary] for p in params], device=ids.device)
    top_p = ordered.new_tensor([[p.top_p if p.top_p < 1.0 else 2.0] for p in params])
    min_p = ordered.new_tensor([[p.min_p] for p in params])
    rank = torch.arange(vocabulary, device=ids.device)
    keep = (rank < top_k) & (ordered.cumsum(-1) - ordered < top_p) & (ordered >= min_p * ordered[:, :1])
    place = _invert(ordered * keep, uniforms)
    return ids.gather(1, place[:, None])[:, 0]
