"""An objective from its parts: advantages, corrections, weighted loss terms, one aggregation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.objective import (
    AdvantageEstimator,
    BatchColumns,
    Correction,
    LossTerm,
    MicroBatch,
    Needs,
)
from miles_core.errors import NumericsError
from miles_core.objective.aggregation import Aggregation, token_weights
from miles_core.objective.columns import token_trajectory, tokens_of

if TYPE_CHECKING:
    import torch

__all__ = ["ComposedObjective", "PreparedComposition", "WeightedTerm", "compose"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightedTerm:
    """A loss term under its config name, with its coefficient."""

    name: str
    term: LossTerm[Any]
    coefficient: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComposedObjective:
    """Implements `miles_core.contracts.objective.Objective`."""

    estimator: AdvantageEstimator[Any] | None
    terms: tuple[WeightedTerm, ...]
    corrections: tuple[tuple[str, Correction[Any]], ...]
    aggregation: Aggregation
    constant_length: int

    @property
    def needs(self) -> Needs:
        parts: list[LossTerm[Any] | Correction[Any]] = [t.term for t in self.terms]
        parts += [correction for _, correction in self.corrections]
        needs = self.estimator.needs if self.estimator is not None else Needs.NOTHING
        for part in parts:
            needs |= part.needs
        return needs

    def prepare(self, columns: BatchColumns) -> PreparedComposition:
        """Raises `NumericsError`, naming the trajectories, when a reward or an advantage is not finite."""
        metrics: dict[str, float] = {}
        advantages = columns.rollout_logprobs.new_zeros(len(columns.rollout_logprobs))
        returns = None
        if self.estimator is not None:
            per_trajectory = columns.rewards[columns.episode_of]
            _refuse_non_finite(per_trajectory, None, columns.trajectory_ids, "reward")
            estimated = self.estimator.estimate(columns)
            advantages, returns = estimated.advantages, estimated.returns
            metrics |= estimated.metrics
            _refuse_non_finite(advantages, columns.offsets, columns.trajectory_ids, "advantage")
        factors = advantages.new_ones(len(advantages))
        for name, correction in self.corrections:
            corrected = correction.correct(columns, advantages)
            _refuse_non_finite(corrected.weights, columns.offsets, columns.trajectory_ids, f"weight of {name}")
            factors = factors * corrected.weights
            metrics |= {f"{name}/{key}": value for key, value in corrected.metrics.items()}
        return PreparedComposition(
            columns=columns,
            terms=self.terms,
            weights=token_weights(columns, self.aggregation, constant_length=self.constant_length),
            advantages=advantages,
            returns=returns,
            factors=factors,
            metrics=metrics,
            tokens=max(int(columns.loss_mask.sum()), 1),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedComposition:
    """An objective bound to one global batch: every normaliser is fixed, so micro-batches only add up."""

    columns: BatchColumns
    terms: tuple[WeightedTerm, ...]
    weights: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor | None
    factors: torch.Tensor
    metrics: Mapping[str, float]
    tokens: int

    def loss(
        self, trajectories: torch.Tensor, logprobs: torch.Tensor, extra: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The micro-batch's share of the loss, and its shares of the metrics: over all micro-batches they add up to
        the loss and to means over the batch's trainable tokens. Raises `NumericsError` for a non-finite loss."""
        columns = self.columns
        index = tokens_of(columns.offsets, trajectories)
        offsets = trajectories.new_zeros(len(trajectories) + 1)
        offsets[1:] = columns.offsets.diff()[trajectories].cumsum(0)
        rollout = columns.rollout_logprobs[index]
        batch = MicroBatch(
            offsets=offsets,
            loss_mask=columns.loss_mask[index],
            logprobs=logprobs,
            old_logprobs=rollout if columns.old_logprobs is None else columns.old_logprobs[index],
            rollout_logprobs=rollout,
            advantages=self.advantages[index],
            corrections=self.factors[index],
            entropy=extra.get("entropy"),
            values=extra.get("values"),
            old_values=_take(columns.values, index),
            returns=_take(self.returns, index),
            reference_logprobs=_take(columns.reference_logprobs, index),
            teacher_logprobs=_take(columns.teacher_logprobs, index),
            top_logprobs=extra.get("top_logprobs"),
            teacher_top_logprobs=_take(columns.teacher_top_logprobs, index),
        )
        weights = self.weights[index].to(logprobs.dtype)
        total = logprobs.new_zeros(())
        shares: dict[str, torch.Tensor] = {}
        for weighted in self.terms:
            result = weighted.term.loss(batch)
            per_token = result.per_token.where(batch.loss_mask, logprobs.new_zeros(()))
            names = [columns.trajectory_ids[i] for i in trajectories.tolist()] if columns.trajectory_ids else []
            _refuse_non_finite(per_token, offsets, names, f"loss term {weighted.name}")
            share = (weights * per_token).sum()
            total = total + weighted.coefficient * share
            shares[f"loss/{weighted.name}"] = share.detach()
            shares |= {f"{weighted.name}/{key}": value / self.tokens for key, value in result.sums.items()}
        return total, shares


def compose(
    *,
    estimator: AdvantageEstimator[Any] | None,
    terms: Sequence[WeightedTerm],
    corrections: Sequence[tuple[str, Correction[Any]]] = (),
    aggregation: Aggregation = "token",
    constant_length: int = 0,
) -> ComposedObjective:
    """Check that the parts fit together. `estimator` None is for objectives without advantages (supervised)."""
    if not terms:
        raise ValueError("an objective needs at least one loss term")
    names = [t.name for t in terms]
    if len(set(names)) != len(names):
        raise ValueError(f"loss terms {names} name one twice")
    if aggregation == "constant" and constant_length < 1:
        raise ValueError("aggregation 'constant' needs constant_length of at least 1 token")
    return ComposedObjective(
        estimator=estimator,
        terms=tuple(terms),
        corrections=tuple(corrections),
        aggregation=aggregation,
        constant_length=constant_length,
    )


def _take(column: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor | None:
    return None if column is None else column[index]


def _refuse_non_finite(values: torch.Tensor, offsets: torch.Tensor | None, names: Sequence[str], what: str) -> None:
    """`values` are one a token of the trajectories that `offsets` delimits, or one a trajectory without offsets."""
    bad = ~values.detach().isfinite()
    if not bool(bad.any()):
        return
    positions = bad.nonzero()[:, 0]
    owner_of = positions if offsets is None else token_trajectory(offsets)[positions]
    owners = list(dict.fromkeys(owner_of.tolist()))
    listed = ", ".join(names[i] if names else f"number {i}" for i in owners[:8])
    more = f" and {len(owners) - 8} more" if len(owners) > 8 else ""
    raise NumericsError(
        f"{what} is not finite ({values.detach()[bad][0].item()}) in trajectories {listed}{more}; "
        "the optimizer has not moved"
    )
