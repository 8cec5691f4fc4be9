"""GSPO (arXiv 2507.18071): GRPO's advantages; the importance ratio belongs to the sequence (`policy` term)."""

from __future__ import annotations

from miles_core.contracts.component import Requirement
from miles_core.objective.grpo import Grpo

__all__ = ["Gspo"]


class Gspo(Grpo):
    """Set `ratio = "sequence"` in the policy term; clip ranges are of the order of 3e-4."""

    requires = (
        Requirement(
            key="objective.policy.ratio",
            values=("sequence",),
            reason="GSPO's importance ratio is that of the whole sequence",
        ),
    )
