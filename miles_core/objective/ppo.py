"""PPO's advantages: GAE (arXiv 1506.02438) over trainable tokens only."""

from __future__ import annotations

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import AdvantageEstimator, Advantages, BatchColumns, Needs
from miles_core.objective.returns import last_token_rewards, trainable_slots
from miles_core.objective.whitening import whiten

__all__ = ["Ppo", "PpoConfig"]


class PpoConfig(ComponentConfig):
    """Section of `ppo`."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount from one trainable token to the next."""

    lambda_: float = Field(default=0.95, ge=0, le=1, alias="lambda")
    """GAE's λ."""

    whiten: bool = True
    """Whiten the advantages over the global batch."""


class Ppo(AdvantageEstimator[PpoConfig]):
    """δ_t = r_t + γ V_(t+1) − V_t, A_t = δ_t + γλ A_(t+1), where t + 1 is the next *trainable* token.

    After the last one V is 0, or, when a length limit cut the trajectory, the value at that token (bootstrap).
    """

    Config = PpoConfig
    needs = Needs.VALUES

    def estimate(self, columns: BatchColumns) -> Advantages:
        assert columns.values is not None
        gamma, decay = self.config.gamma, self.config.gamma * self.config.lambda_
        mask = columns.loss_mask
        owner, slot, width = trainable_slots(columns)
        shape = (len(columns.offsets) - 1, width)
        rewards = columns.rewards.new_zeros(shape).double()
        values = columns.rewards.new_zeros(shape).double()
        present = mask.new_zeros(shape)
        rewards[owner, slot] = last_token_rewards(columns)[mask]
        values[owner, slot] = columns.values.double()[mask]
        present[owner, slot] = True
        truncated = columns.truncated.double()
        advantages = rewards.new_zeros(shape)
        following = rewards.new_zeros(shape[0])
        next_value = rewards.new_zeros(shape[0])
        for t in range(width - 1, -1, -1):
            here = present[:, t]
            last = here if t == width - 1 else here & ~present[:, t + 1]
            after = (values[:, t] * truncated).where(last, next_value)
            following = (rewards[:, t] + gamma * after - values[:, t] + decay * following).where(here, following)
            next_value = values[:, t].where(here, next_value)
            advantages[:, t] = following
        flat = columns.rewards.new_zeros(len(mask)).double()
        flat[mask] = advantages[owner, slot]
        returns = (flat + columns.values.double()).where(mask, flat.new_zeros(()))
        spread = returns[mask].var(correction=0) if bool(mask.any()) else flat.new_zeros(())
        missed = flat[mask].var(correction=0) if bool(mask.any()) else flat.new_zeros(())
        return Advantages(
            advantages=(whiten(flat, mask) if self.config.whiten else flat).float(),
            returns=returns.float(),
            metrics={
                "reward/mean": float(columns.rewards.mean()) if len(columns.rewards) else 0.0,
                "critic/explained_variance": float(1 - missed / spread) if spread > 0 else 0.0,
            },
        )
