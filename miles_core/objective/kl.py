"""KL(π ‖ π_ref) from samples of π: the estimators k1, k2, k3 (Schulman 2020, joschu.net/blog/kl-approx.html).

| name | with d = log π − log π_ref | as a loss |
|---|---|---|
| `k1` | d | refused: E[∇d] = E[∇ log π] = 0, it pulls nowhere |
| `k2` | d² / 2 | unbiased gradient of the reverse KL on policy |
| `k3` | exp(−d) − 1 + d | never negative, low variance (default) |
| `k3_clamped` | k3 with d in ±20, result at most 10 | bounded, flat outside |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import field_validator

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import LossTerm, MicroBatch, Needs, TermLoss

if TYPE_CHECKING:
    import torch

__all__ = ["Kl", "KlConfig", "KlEstimator", "kl_estimate"]

KlEstimator = Literal["k1", "k2", "k3", "k3_clamped"]

_LOG_RATIO_BOUND = 20.0
_KL_BOUND = 10.0


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token estimate of KL(π ‖ π_ref) in nats, same shape, differentiable."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return (-difference).expm1() + difference
    bounded = difference.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return ((-bounded).expm1() + bounded).clamp(max=_KL_BOUND)


class KlConfig(ComponentConfig):
    """Section of the `kl` term."""

    estimator: KlEstimator = "k3"
    """k2, k3 or k3_clamped."""

    unbiased: bool = False
    """Weight by the importance ratio π / π_old, so that the estimate is unbiased off policy (arXiv 2512.02556)."""

    @field_validator("estimator")
    @classmethod
    def _no_k1(cls, value: KlEstimator) -> KlEstimator:
        if value == "k1":
            raise ValueError(
                "k1 as a loss does nothing: its gradient is the score function, which vanishes in expectation. "
                "Use k3 (default) or k2; k1 is fine as a reward penalty (reinforce_pp)"
            )
        return value


class Kl(LossTerm[KlConfig]):
    """Distance from the frozen reference policy."""

    Config = KlConfig
    needs = Needs.REFERENCE

    def loss(self, batch: MicroBatch) -> TermLoss:
        assert batch.reference_logprobs is not None
        zero = batch.logprobs.new_zeros(())
        logprobs = batch.logprobs.where(batch.loss_mask, zero)
        reference = batch.reference_logprobs.to(logprobs.dtype).where(batch.loss_mask, zero)
        estimate = kl_estimate(logprobs, reference, self.config.estimator)
        if self.config.unbiased:
            old = batch.old_logprobs.to(logprobs.dtype).where(batch.loss_mask, zero)
            estimate = estimate * (logprobs - old).exp()
        return TermLoss(per_token=estimate, sums={"kl": estimate.detach().double().sum()})
