"""Laws of advantage estimators: finite for every batch, zero where nothing trains, blind to order.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from miles_core.contracts.objective import Advantages, BatchColumns, Needs
from miles_core.testing.columns import DEGENERATE, make_columns, permuted
from miles_core.testing.kit import Case, Check

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS"]


def advantages_are_float32_one_a_token(case: Case) -> None:
    import torch

    columns = make_columns()
    result = _estimate(case, columns)
    for name in ("advantages", "returns"):
        column = getattr(result, name)
        if column is None and name == "returns":
            continue
        assert column.dtype == torch.float32, f"{name} are {column.dtype}, expected float32"
        assert column.shape == columns.loss_mask.shape, (
            f"{name} have shape {tuple(column.shape)}, expected {tuple(columns.loss_mask.shape)}"
        )
    assert bool(result.advantages.any()), "a batch with different rewards has advantages of 0 alone"


def degenerate_groups_are_finite(case: Case) -> None:
    for what, shape in DEGENERATE.items():
        for masked in (True, False):
            try:
                result = _estimate(case, make_columns(shape, masked=masked))
            except Exception as error:
                raise AssertionError(f"{what} raises {type(error).__name__}: {error}") from error
            where = what if masked else f"{what}, nothing of which trains,"
            assert bool(result.advantages.isfinite().all()), f"{where} gives advantages that are not finite"
            assert result.returns is None or bool(result.returns.isfinite().all()), (
                f"{where} gives returns that are not finite"
            )
            wrong = [name for name, value in result.metrics.items() if not math.isfinite(value)]
            assert not wrong, f"{where} gives metrics that are not finite: {', '.join(wrong)}"


def nothing_outside_the_mask(case: Case) -> None:
    for masked in (True, False):
        columns = make_columns(masked=masked)
        outside = _estimate(case, columns).advantages[~columns.loss_mask]
        assert not bool(outside.any()), "a token that does not train has an advantage other than 0"


def order_does_not_matter(case: Case) -> None:
    columns = make_columns()
    count = len(columns.episode_of)
    order = [(5 * i + 3) % count for i in range(count)] if math.gcd(5, count) == 1 else list(reversed(range(count)))
    changed, places = permuted(columns, order)
    here, there = _estimate(case, columns).advantages, _estimate(case, changed).advantages
    assert _close(here[places], there), (
        "the batch with its trajectories, episodes and groups in another order has other advantages"
    )


def it_is_pure(case: Case) -> None:
    columns = make_columns()
    before = copy.deepcopy(columns)
    estimator = case.create()
    first = estimator.estimate(_asked(columns, estimator)).advantages.clone()
    estimator.estimate(_asked(make_columns(seed=1), estimator))
    second = estimator.estimate(_asked(columns, estimator)).advantages
    assert bool((first == second).all()), "the same batch has other advantages the second time"
    for field in dataclasses.fields(columns):
        was, now = getattr(before, field.name), getattr(columns, field.name)
        same = bool((was == now).all()) if hasattr(was, "shape") else was == now
        assert same, f"the column {field.name} of the batch was changed in place"


CHECKS: tuple[Check, ...] = (
    advantages_are_float32_one_a_token,
    degenerate_groups_are_finite,
    nothing_outside_the_mask,
    order_does_not_matter,
    it_is_pure,
)


def _estimate(case: Case, columns: BatchColumns) -> Advantages:
    estimator = case.create()
    result: Advantages = estimator.estimate(_asked(columns, estimator))
    return result


def _asked(columns: BatchColumns, estimator: Any) -> BatchColumns:
    """The columns that the estimator's `needs` asks for."""
    needs: Needs = estimator.needs
    return dataclasses.replace(
        columns,
        values=columns.values if Needs.VALUES in needs else None,
        reference_logprobs=columns.reference_logprobs if Needs.REFERENCE in needs else None,
        teacher_logprobs=columns.teacher_logprobs if Needs.TEACHER in needs else None,
        teacher_top_ids=columns.teacher_top_ids if Needs.TEACHER_TOP in needs else None,
        teacher_top_logprobs=columns.teacher_top_logprobs if Needs.TEACHER_TOP in needs else None,
        old_logprobs=columns.old_logprobs if Needs.TRAINER_LOGPROBS in needs else None,
    )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= 1e-5 + 1e-5 * b.abs()).all())
