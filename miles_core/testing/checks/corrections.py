"""Laws of corrections: finite weights of at least 0, that say what they changed and change nothing without need.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import dataclasses
import math

from miles_core.contracts.objective import BatchColumns, Corrected
from miles_core.testing.columns import DEGENERATE, make_columns, permuted
from miles_core.testing.kit import Case, Check

__all__ = ["CHECKS"]


def weights_are_finite_and_not_negative(case: Case) -> None:
    import torch

    for what, columns in _batches().items():
        weights = _correct(case, columns).weights
        assert weights.dtype == torch.float32, f"weights are {weights.dtype}, expected float32"
        assert weights.shape == columns.loss_mask.shape, (
            f"weights have shape {tuple(weights.shape)}, expected {tuple(columns.loss_mask.shape)}"
        )
        assert bool(weights.isfinite().all()), f"{what}: a weight is not finite"
        assert bool((weights >= 0).all()), f"{what}: a weight is negative, which turns an advantage around"
        assert not weights.requires_grad, "weights carry a gradient"


def it_is_deterministic(case: Case) -> None:
    columns = make_columns()
    first, second = _correct(case, columns), _correct(case, columns)
    assert bool((first.weights == second.weights).all()), "the same batch gets other weights the second time"
    assert dict(first.metrics) == dict(second.metrics), "the same batch gets other metrics the second time"


def agreement_changes_nothing(case: Case) -> None:
    columns = _agreeing(make_columns())
    weights = _correct(case, columns).weights[columns.loss_mask]
    assert bool((weights - 1).abs().le(1e-6).all()), (
        "trainer and rollout agree on every token, and a weight is not 1: there is nothing to correct"
    )


def metrics_say_what_changed(case: Case) -> None:
    columns = _drifted(make_columns(), 4.0)
    changed, idle = _correct(case, columns), _correct(case, _agreeing(columns))
    for result in (changed, idle):
        wrong = [name for name, value in result.metrics.items() if not math.isfinite(value)]
        assert not wrong, f"metrics are not finite: {', '.join(wrong)}"
    assert changed.metrics, "metrics are empty: nothing says what the correction does to a run"
    acts = bool((changed.weights[columns.loss_mask] != 1).any())
    assert not acts or dict(changed.metrics) != dict(idle.metrics), (
        "weights differ from 1, and every metric reads as if nothing had been changed"
    )


def order_does_not_matter(case: Case) -> None:
    columns = make_columns()
    order = list(reversed(range(len(columns.episode_of))))
    changed, places = permuted(columns, order)
    difference = (_correct(case, columns).weights[places] - _correct(case, changed).weights).abs()
    assert bool(difference.le(1e-5).all()), "the batch with its trajectories in another order gets other weights"


CHECKS: tuple[Check, ...] = (
    weights_are_finite_and_not_negative,
    it_is_deterministic,
    agreement_changes_nothing,
    metrics_say_what_changed,
    order_does_not_matter,
)


def _correct(case: Case, columns: BatchColumns) -> Corrected:
    mask = columns.loss_mask
    # A pattern that belongs to the token, so that it moves with it.
    advantages = (columns.rollout_logprobs + 1).where(mask, columns.rollout_logprobs.new_zeros(()))
    result: Corrected = case.create().correct(columns, advantages)
    return result


def _agreeing(columns: BatchColumns) -> BatchColumns:
    return dataclasses.replace(columns, old_logprobs=columns.rollout_logprobs.clone())


def _drifted(columns: BatchColumns, nats: float) -> BatchColumns:
    """The trainer's log-probs lie `nats` above and below the rollout's, by turns."""
    import torch

    signs = torch.where(torch.arange(len(columns.loss_mask)) % 2 == 0, nats, -nats)
    return dataclasses.replace(columns, old_logprobs=columns.rollout_logprobs + signs)


def _batches() -> dict[str, BatchColumns]:
    batches = {what: make_columns(shape) for what, shape in DEGENERATE.items()}
    usual = make_columns()
    return {
        **batches,
        "the usual batch": usual,
        "log-probs 20 nats apart": _drifted(usual, 20.0),
        "log-probs 500 nats apart": _drifted(usual, 500.0),
        "nothing trains": make_columns(masked=False),
    }
