"""The clipped policy-gradient term (PPO, arXiv 1707.06347), with the variants that are in use.

`clip_low` and `clip_high` differ in clip-higher (DAPO, arXiv 2503.14476); `dual_clip` bounds the loss of tokens with a
negative advantage (arXiv 1912.09729); `ratio = "sequence"` uses exp of the trajectory's mean log-ratio (GSPO, arXiv
2507.18071).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Conflict
from miles_core.contracts.objective import LossTerm, MicroBatch, TermLoss
from miles_core.objective.columns import segment_mean, token_trajectory

if TYPE_CHECKING:
    import torch

__all__ = ["Policy", "PolicyConfig"]


class PolicyConfig(ComponentConfig):
    """Section of the `policy` term."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below 1 − clip_low."""

    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above 1 + clip_high."""

    dual_clip: float | None = Field(default=None, gt=1)
    """With a negative advantage, the ratio counts as this at most. None: unbounded."""

    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or one for the trajectory (GSPO)."""


class Policy(LossTerm[PolicyConfig]):
    """−min(ratio · A, clip(ratio) · A), times the corrections."""

    Config = PolicyConfig
    conflicts = (
        Conflict(
            key="objective.algorithm",
            values=("none",),
            reason="without advantages the policy term is 0",
        ),
    )

    def loss(self, batch: MicroBatch) -> TermLoss:
        config = self.config
        log_ratio = (batch.logprobs - batch.old_logprobs).where(batch.loss_mask, batch.logprobs.new_zeros(()))
        if config.ratio == "sequence":
            means = segment_mean(log_ratio, batch.loss_mask, batch.offsets)
            log_ratio = means[token_trajectory(batch.offsets)]
        ratio = log_ratio.exp()
        advantages = batch.advantages.to(ratio.dtype)
        clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        plain, clipped = -ratio * advantages, -clipped_ratio * advantages
        loss = plain.maximum(clipped)
        dual = loss.new_zeros(loss.shape).bool()
        if config.dual_clip is not None:
            bound = -config.dual_clip * advantages
            dual = (advantages < 0) & (loss > bound)
            loss = bound.where(dual, loss)
        sums = {
            "ratio": _sum(ratio, batch),
            "clipped_low": _sum((clipped > plain) & (advantages < 0), batch),
            "clipped_high": _sum((clipped > plain) & (advantages > 0), batch),
        }
        if config.dual_clip is not None:
            sums["dual_clipped"] = _sum(dual, batch)
        return TermLoss(per_token=loss * batch.corrections.to(loss.dtype), sums=sums)


def _sum(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return values.detach().double().where(batch.loss_mask, values.new_zeros(()).double()).sum()
