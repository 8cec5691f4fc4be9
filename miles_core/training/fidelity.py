"""How far the trainer's log-probs are from those that the policy sampled with."""

from __future__ import annotations

import torch

from miles_core.contracts.objective import BatchColumns

__all__ = ["fidelity_metrics"]


def fidelity_metrics(columns: BatchColumns, trainer_logprobs: torch.Tensor) -> dict[str, float]:
    """Over the trainable tokens: |Δ log-prob| mean and maximum, share of ratios outside [0, 2], KL(rollout ‖ trainer).

    `trainer_logprobs` float32 [N] are those of the weights before the step. Empty when nothing trains, and when
    no policy sampled what trains (its log-probs are all 0, as those of supervised data).
    """
    mask = columns.loss_mask
    if not bool(columns.rollout_logprobs[mask].any()):
        return {}
    difference = (trainer_logprobs - columns.rollout_logprobs)[mask].double()
    ratio = difference.exp()
    return {
        "fidelity/abs_difference_mean": float(difference.abs().mean()),
        "fidelity/abs_difference_max": float(difference.abs().max()),
        "fidelity/ratio_above_2": float((ratio > 2).double().mean()),
        "fidelity/kl": float((difference.expm1() - difference).mean()),
    }
