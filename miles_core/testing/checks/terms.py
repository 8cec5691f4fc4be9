"""Laws of loss terms: one number a token, gradients that masked-out tokens cannot reach, additivity.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miles_core.contracts.objective import MicroBatch
from miles_core.testing.columns import make_micro_batch, micro_part, with_needs
from miles_core.testing.kit import Case, Check

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS"]

WILD = 1e4


def one_loss_a_token(case: Case) -> None:
    batch, result = _loss(case)
    assert result.per_token.shape == batch.loss_mask.shape, (
        f"per_token has shape {tuple(result.per_token.shape)}, expected {tuple(batch.loss_mask.shape)}"
    )
    assert bool(result.per_token[batch.loss_mask].isfinite().all()), "the loss of a token that trains is not finite"
    for name, value in result.sums.items():
        assert value.ndim == 0, f"the sum {name!r} has shape {tuple(value.shape)}, expected a scalar"
        assert bool(value.isfinite()), f"the sum {name!r} is {value.item()}"
        assert not value.requires_grad, f"the sum {name!r} carries a gradient; detach what is only reported"


def gradients_reach_the_tokens_that_train(case: Case) -> None:
    batch, result = _loss(case)
    gradients = _gradients(batch, result.per_token)
    assert gradients, "the loss does not depend on log-probs, entropy or values"
    for name, gradient in gradients.items():
        assert bool(gradient.isfinite().all()), f"the gradient with respect to {name} is not finite"
    assert any(bool(gradient[batch.loss_mask].any()) for gradient in gradients.values()), (
        "no token that trains has a gradient"
    )


def what_is_masked_out_is_ignored(case: Case) -> None:
    batch, result = _loss(case)
    expected = _gradients(batch, result.per_token)
    for sign in (1.0, -1.0):
        wild, strange = _loss(case, wild=sign * WILD)
        kept = batch.loss_mask
        assert _close(result.per_token[kept], strange.per_token[kept]), (
            "the loss of tokens that train depends on values at tokens that do not"
        )
        for name, gradient in _gradients(wild, strange.per_token).items():
            assert bool(gradient.isfinite().all()), (
                f"values of {sign * WILD:g} at tokens that do not train make a NaN in the gradient of {name}: replace "
                "them before the exponential, not after"
            )
            assert _close(gradient[kept], expected[name][kept]), (
                f"the gradient of {name} at tokens that train depends on values at tokens that do not"
            )
        for name, value in result.sums.items():
            assert _close(value, strange.sums[name]), f"the sum {name!r} counts tokens that do not train"


def micro_batches_add_up(case: Case) -> None:
    import torch

    batch, whole = _loss(case)
    count = len(batch.offsets) - 1
    term = case.create()
    parts = [term.loss(micro_part(batch, first, last)) for first, last in ((0, 3), (3, count))]
    joined = torch.cat([part.per_token for part in parts])
    kept = batch.loss_mask
    assert _close(joined[kept], whole.per_token[kept]), (
        "a token's loss depends on which trajectories share its micro-batch"
    )
    for name, value in whole.sums.items():
        assert all(name in part.sums for part in parts), f"the sum {name!r} is missing for some micro-batches"
        total = torch.stack([part.sums[name].double() for part in parts]).sum()
        assert _close(total, value.double()), f"{name!r} is no sum: over two micro-batches it is {total}, not {value}"


def it_asks_for_what_it_uses(case: Case) -> None:
    try:
        _loss(case)
    except Exception as error:
        raise AssertionError(
            f"with the columns that `needs` = {case.component.needs} asks for, loss() raises "  # type: ignore[attr-defined]
            f"{type(error).__name__}: {error}"
        ) from error


CHECKS: tuple[Check, ...] = (
    it_asks_for_what_it_uses,
    one_loss_a_token,
    gradients_reach_the_tokens_that_train,
    what_is_masked_out_is_ignored,
    micro_batches_add_up,
)

_LEAVES = ("logprobs", "entropy", "values", "top_logprobs")
_WILD_SIGNS = {
    "logprobs": 1,
    "values": 1,
    "top_logprobs": 1,
    "teacher_top_logprobs": -1,
    "old_logprobs": -1,
    "rollout_logprobs": -1,
    "reference_logprobs": -1,
    "teacher_logprobs": -1,
    "old_values": -1,
    "returns": -1,
}
"""Columns that are extreme at masked-out tokens, and on which side, so that every difference of two is extreme."""


def _loss(case: Case, *, wild: float | None = None) -> tuple[MicroBatch, Any]:
    """The term's loss on the usual micro-batch; with `wild`, log-probs and values at masked-out tokens are extreme."""
    term = case.create()
    batch = make_micro_batch()
    if wild is not None:
        changes: dict[str, Any] = {}
        for name, sign in _WILD_SIGNS.items():
            column = getattr(batch, name).detach()
            kept = batch.loss_mask if column.ndim == 1 else batch.loss_mask[:, None]
            changed = column.where(kept, column.new_full((), sign * wild))
            changes[name] = changed.requires_grad_() if name in _LEAVES else changed
        batch = dataclasses.replace(batch, **changes)
    batch = with_needs(batch, term.needs)
    return batch, term.loss(batch)


def _gradients(batch: MicroBatch, per_token: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the masked sum, for those of the leaves on which it depends."""
    import torch

    total = per_token.where(batch.loss_mask, per_token.new_zeros(())).sum()
    assert total.requires_grad, "per_token carries no gradient"
    leaves = {name: getattr(batch, name) for name in _LEAVES if getattr(batch, name) is not None}
    found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= 1e-5 + 1e-5 * b.abs()).all())
