"""REINFORCE++ and its baseline variant (arXiv 2501.03262): token-level KL penalty, batch-wide whitening."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import AdvantageEstimator, Advantages, BatchColumns, Needs
from miles_core.objective.columns import token_episode
from miles_core.objective.grpo import group_advantages
from miles_core.objective.kl import KlEstimator, kl_estimate
from miles_core.objective.returns import discounted_returns, last_token_rewards
from miles_core.objective.whitening import whiten

if TYPE_CHECKING:
    import torch

__all__ = ["ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "ReinforcePlusPlusConfig"]


class ReinforcePlusPlusConfig(ComponentConfig):
    """Section of `reinforce_pp` and `reinforce_pp_baseline`."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the return from one trainable token to the next (reinforce_pp only)."""

    kl_coefficient: float = Field(default=0.0, ge=0)
    """β of the per-token penalty. With 0 no reference model is loaded."""

    kl_estimator: KlEstimator = "k1"
    """Estimator of the penalty."""

    @model_validator(mode="after")
    def _unused_penalty(self) -> ReinforcePlusPlusConfig:
        if self.kl_coefficient == 0 and "kl_estimator" in self.model_fields_set:
            raise ValueError("kl_estimator has no effect while kl_coefficient is 0")
        return self


class _WithPenalty(AdvantageEstimator[ReinforcePlusPlusConfig]):
    """What the two share: a KL penalty that asks for reference log-probs only when it counts."""

    Config = ReinforcePlusPlusConfig

    def __init__(self, config: ReinforcePlusPlusConfig) -> None:
        super().__init__(config)
        if config.kl_coefficient:
            self.needs = Needs.REFERENCE | Needs.TRAINER_LOGPROBS  # type: ignore[misc]

    def penalty(self, columns: BatchColumns) -> torch.Tensor:
        """β · KL of each trainable token, float64 [N]."""
        zeros = columns.rewards.new_zeros(len(columns.loss_mask)).double()
        if not self.config.kl_coefficient:
            return zeros
        assert columns.reference_logprobs is not None
        assert columns.old_logprobs is not None
        mask = columns.loss_mask
        old, reference = columns.old_logprobs.double(), columns.reference_logprobs.double()
        estimate = kl_estimate(old.where(mask, zeros), reference.where(mask, zeros), self.config.kl_estimator)
        return self.config.kl_coefficient * estimate

    def finish(self, raw: torch.Tensor, columns: BatchColumns, penalty: torch.Tensor) -> Advantages:
        tokens = max(int(columns.loss_mask.sum()), 1)
        return Advantages(
            advantages=whiten(raw, columns.loss_mask).float(),
            metrics={
                "advantage/kl_penalty": float(penalty.sum()) / tokens,
                "reward/mean": float(columns.rewards.mean()) if len(columns.rewards) else 0.0,
            },
        )


class ReinforcePlusPlus(_WithPenalty):
    """Reward at the last trainable token, minus the penalty at each, discounted, whitened over the global batch."""

    def estimate(self, columns: BatchColumns) -> Advantages:
        penalty = self.penalty(columns)
        returns = discounted_returns(columns, last_token_rewards(columns) - penalty, gamma=self.config.gamma)
        return self.finish(returns, columns, penalty)


class ReinforcePlusPlusBaseline(_WithPenalty):
    """Reward minus the group's mean, minus the penalty, whitened over the global batch."""

    def estimate(self, columns: BatchColumns) -> Advantages:
        penalty = self.penalty(columns)
        centred, _ = group_advantages(columns.rewards, columns.group_of, scale="none")
        return self.finish(centred[token_episode(columns)] - penalty, columns, penalty)
