"""No advantages: for objectives that read no reward, as supervised fine-tuning and pure distillation."""

from __future__ import annotations

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.objective import AdvantageEstimator, Advantages, BatchColumns

__all__ = ["NoAdvantages"]


class NoAdvantages(AdvantageEstimator[ComponentConfig]):
    """Every advantage is 0."""

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """The laws of estimators are about advantages."""
        return Example(unavailable="it gives no advantages")

    def estimate(self, columns: BatchColumns) -> Advantages:
        return Advantages(advantages=columns.rollout_logprobs.new_zeros(len(columns.rollout_logprobs)))
