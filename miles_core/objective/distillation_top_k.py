"""Distillation on the teacher's k likeliest tokens (generalised knowledge distillation, arXiv 2306.13649).

At every token of the student's own samples, student and teacher are compared on k + 1 outcomes: each of the k tokens
that the teacher finds likeliest, and "any other". The divergence of these two distributions is exact, not sampled, and
never above that of the whole vocabularies (data-processing inequality).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import LossTerm, MicroBatch, Needs, TermLoss

if TYPE_CHECKING:
    import torch

__all__ = ["DistillationTopK", "DistillationTopKConfig"]

SMALLEST_REST = 1e-6
"""A smaller probability of "any other" counts as this: float32 sums are no more exact, and its logarithm is finite."""


class DistillationTopKConfig(ComponentConfig):
    """Section of `distillation_top_k`; k is `teacher.top_k`."""

    direction: Literal["reverse", "forward"] = "reverse"
    """reverse: KL(student ‖ teacher), seeks one mode; forward: KL(teacher ‖ student), covers all of them."""


class DistillationTopK(LossTerm[DistillationTopKConfig]):
    """The divergence at each token, differentiated through the student's log-probs, times the corrections."""

    Config = DistillationTopKConfig
    needs = Needs.TEACHER_TOP

    def loss(self, batch: MicroBatch) -> TermLoss:
        assert batch.top_logprobs is not None
        assert batch.teacher_top_logprobs is not None
        student = _with_rest(batch.top_logprobs, batch.loss_mask)
        teacher = _with_rest(batch.teacher_top_logprobs.to(student.dtype), batch.loss_mask)
        first, second = (student, teacher) if self.config.direction == "reverse" else (teacher, student)
        divergence = (first.exp() * (first - second)).sum(-1)
        return TermLoss(
            per_token=divergence * batch.corrections.to(divergence.dtype),
            sums={"kl": divergence.detach().double().sum()},
        )


def _with_rest(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[n, k] to [n, k + 1]: behind the k log-probs, that of any other token. Masked rows become uniform."""
    import torch

    uniform = logprobs.new_full((), -math.log(logprobs.shape[-1] + 1))
    kept = logprobs.where(mask[:, None], uniform)
    rest = (-kept.exp().sum(-1, keepdim=True).clamp(max=1 - SMALLEST_REST)).log1p()
    return torch.cat([kept, rest], dim=-1)
