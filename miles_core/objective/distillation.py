"""On-policy distillation (arXiv 2306.13649): reverse KL to a teacher, on the student's own samples.

The gradient of KL(π ‖ π_teacher) with respect to the policy is that of a policy gradient with advantage
−(log π − log π_teacher): the difference is a weight, not differentiated through. The teacher's log-probs are at the
sampling temperature.
"""

from __future__ import annotations

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import LossTerm, MicroBatch, Needs, TermLoss

__all__ = ["Distillation"]


class Distillation(LossTerm[ComponentConfig]):
    """ratio · (log π_old − log π_teacher), times the corrections; the coefficient is λ."""

    needs = Needs.TEACHER

    def loss(self, batch: MicroBatch) -> TermLoss:
        assert batch.teacher_logprobs is not None
        mask, zero = batch.loss_mask, batch.logprobs.new_zeros(())
        old = batch.old_logprobs.to(zero.dtype).where(mask, zero)
        difference = old - batch.teacher_logprobs.to(zero.dtype).where(mask, zero)
        ratio = (batch.logprobs.where(mask, zero) - old).exp()
        return TermLoss(
            per_token=ratio * difference * batch.corrections.to(zero.dtype),
            sums={"reverse_kl": difference.detach().double().sum()},
        )
