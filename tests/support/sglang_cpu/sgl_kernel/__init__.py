"""Stands in for SGLang's CPU kernels, in plain torch: what small dense and mixture-of-experts models call with
`--attention-backend torch_native`. Every other name exists, and raises when it is called.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_TOPK = (
    "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, Tensor? correction_bias=None)"
    " -> (Tensor, Tensor)"
)


def _topk(score: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Weights float32 [tokens, k] and ids int32 [tokens, k] of the experts with the highest scores."""

    def route(
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        topk: int,
        renormalize: bool,
        correction_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = score(gating_output.float())
        ranked = scores if correction_bias is None else scores + correction_bias
        chosen = ranked.topk(topk, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen.to(torch.int32)

    return route


for _name, _score in {"softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid}.items():
    _LIBRARY.define(f"topk_{_name}_cpu{_TOPK}")
    _LIBRARY.impl(f"topk_{_name}_cpu", _topk(_score), "CPU")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots behind those that it has."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(f"the stand-in for SGLang's CPU kernels has no {name}")

    return missing


if not torch.cuda.is_available():  # routed experts are recorded in host memory that SGLang asks CUDA to pin
    torch.cuda.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaGetErrorString=str
    )
