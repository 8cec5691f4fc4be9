"""The seam between objective and backend: advantages, loss terms and corrections over flat token columns.

The objective never sees logits. Everything that depends on the whole global batch (advantages, corrections,
aggregation weights, whitening statistics) is computed once over its flat columns, before the first micro-batch;
then, for each micro-batch, the backend hands over per-token log-probs (and entropies, values, … when asked) and
gets back a *sum*. A backend may therefore split vocabulary, sequence, pipeline stages and micro-batches as it
likes: the result is the same.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from miles_core.contracts.component import Component, ConfigT

if TYPE_CHECKING:
    import torch

__all__ = [
    "AdvantageEstimator",
    "Advantages",
    "BatchColumns",
    "Corrected",
    "Correction",
    "LossTerm",
    "MicroBatch",
    "Needs",
    "Objective",
    "TermLoss",
]


class Needs(enum.Flag):
    """What a term or correction asks of the backend beyond the current log-probs. Not asked, not computed."""

    NOTHING = 0
    ENTROPY = enum.auto()
    """Entropy of the next-token distribution at every token."""
    VALUES = enum.auto()
    """Critic value at every token."""
    REFERENCE = enum.auto()
    """Log-probs under the frozen reference weights, in the columns."""
    TEACHER = enum.auto()
    """Log-probs under the teacher, in the columns."""
    TEACHER_TOP = enum.auto()
    """Log-probs of the teacher's likeliest tokens, in the columns, and the current ones of the same tokens."""
    TRAINER_LOGPROBS = enum.auto()
    """Log-probs under the trainer's weights before the step, in the columns (otherwise the rollout's stand in)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchColumns:
    """The global batch as flat columns over all N tokens of S trajectories of E episodes of G groups.

    Trajectory s covers tokens `offsets[s]` to `offsets[s + 1]`. Optional columns are None when nobody needs them.

    | field | dtype, shape | |
    |---|---|---|
    | `offsets` | int64 [S+1] | |
    | `episode_of` | int64 [S] | episode of a trajectory, 0 to E−1 |
    | `group_of` | int64 [E] | group of an episode, 0 to G−1 |
    | `rewards` | float64 [E] | one an episode |
    | `truncated` | bool [S] | stopped by a length limit (bootstraps in GAE) |
    | `loss_mask` | bool [N] | |
    | `rollout_logprobs` | float32 [N] | |
    | `versions` | int32 [N] | −1 where not sampled |
    | `policy_version` | int | trainer's version when the batch was consumed |
    | `weights` | float32 [N], optional | how much a token counts, 0 to 1; without it, 1 |
    | `old_logprobs` | float32 [N], optional | trainer's log-probs before the step |
    | `reference_logprobs`, `teacher_logprobs`, `values` | float32 [N], optional | |
    | `teacher_top_ids` | int64 [N, k], optional | the teacher's k likeliest tokens in place of each token |
    | `teacher_top_logprobs` | float32 [N, k], optional | |
    """

    offsets: torch.Tensor
    episode_of: torch.Tensor
    group_of: torch.Tensor
    rewards: torch.Tensor
    truncated: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    versions: torch.Tensor
    policy_version: int
    weights: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    teacher_top_ids: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None
    trajectory_ids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """`advantages` float32 [N], 0 outside the mask; `returns` float32 [N] for a value term; `metrics` for the
    report."""

    advantages: torch.Tensor
    returns: torch.Tensor | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class AdvantageEstimator(Component[ConfigT], abc.ABC):
    """Rewards to advantages, a pure function of the global batch's columns. Statistics are in float64."""

    needs: ClassVar[Needs] = Needs.NOTHING

    @abc.abstractmethod
    def estimate(self, columns: BatchColumns) -> Advantages:
        """Finite for every degenerate case: one-episode groups, equal rewards, empty masks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """`weights` float32 [N] multiply the policy term's per-token loss (0 drops a token); `metrics` say what changed."""

    weights: torch.Tensor
    metrics: Mapping[str, float]


class Correction(Component[ConfigT], abc.ABC):
    """Answers the mismatch between the trainer's and the rollout's log-probs. Multiplicative; corrections compose."""

    needs: ClassVar[Needs] = Needs.TRAINER_LOGPROBS

    @abc.abstractmethod
    def correct(self, columns: BatchColumns, advantages: torch.Tensor) -> Corrected: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Flat columns over the n tokens of some whole trajectories, as a loss term sees them.

    `logprobs` float32 [n] is differentiable; `entropy` and `values` [n], and `top_logprobs` [n, k] of the teacher's
    likeliest tokens, too when asked for. The rest are slices of the global columns. `offsets` int64 [s+1] delimits the
    trajectories.
    """

    offsets: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    corrections: torch.Tensor
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TermLoss:
    """`per_token` [n], differentiable, before aggregation; `sums` are per-token quantities to report, summed over the
    masked tokens (the objective divides by the global count)."""

    per_token: torch.Tensor
    sums: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class LossTerm(Component[ConfigT], abc.ABC):
    """One additive term of the loss. The objective multiplies by `coefficient` and the aggregation weights."""

    needs: ClassVar[Needs] = Needs.NOTHING

    @abc.abstractmethod
    def loss(self, batch: MicroBatch) -> TermLoss:
        """Per-token loss. Values at unmasked tokens are ignored, and must not make a NaN in the gradient."""


class Objective(Protocol):
    """What a backend optimises; built by `miles_core.objective.compose` from the config's components."""

    @property
    def needs(self) -> Needs: ...

    def prepare(self, columns: BatchColumns) -> PreparedObjective:
        """Advantages, corrections and aggregation weights of the whole batch. Raises `NumericsError`."""
        ...


class PreparedObjective(Protocol):
    """An objective bound to one global batch."""

    @property
    def metrics(self) -> Mapping[str, float]: ...

    def loss(
        self, trajectories: torch.Tensor, logprobs: torch.Tensor, extra: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The micro-batch's share of the loss (a differentiable scalar sum) and sums to report.

        `trajectories` int64 [s] are indices into the global batch; `logprobs` [n] their tokens' log-probs in that
        order; `extra` holds what `needs` asked for: `entropy` and `values` [n], `top_logprobs` [n, k]."""
        ...
