"""No advantages: for objectives that read no reward, as supervised fine-tuning and pure distillation."""

from __future__ import annotations

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.objective import AdvantageEstimator, Advantages, BatchColumns

__all__ = ["NoAdvantages"]


class NoAdvantages(AdvantageEstimator[ComponentConfig]):
    """Every advantage is 0."""

    def estimate(self, columns: BatchColumns) -> Advantages:
        return Advantages(advantages=columns.rollout_logprobs.new_zeros(len(columns.rollout_logprobs)))
