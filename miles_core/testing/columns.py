"""Small global batches for the laws of advantages, loss terms and corrections. Imports torch when called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.objective import BatchColumns, MicroBatch, Needs

if TYPE_CHECKING:
    import torch

__all__ = ["DEGENERATE", "make_columns", "make_micro_batch", "micro_part", "permuted", "with_needs"]

Shape = Sequence[tuple[int, float, Sequence[int]]]
"""Episodes as (group, reward, lengths of their trajectories)."""

USUAL: Shape = (
    (0, 1.0, (4,)),
    (0, 0.0, (3, 5)),
    (0, 0.5, (6,)),
    (1, 0.0, (2,)),
    (1, 2.0, (7,)),
    (2, -1.0, (1,)),
    (2, 1.0, (4, 2)),
)
DEGENERATE: dict[str, Shape] = {
    "a group of one episode": ((0, 1.0, (3,)),),
    "equal rewards": ((0, 1.0, (3,)), (0, 1.0, (2,)), (0, 1.0, (4,))),
    "rewards of 0": ((0, 0.0, (3,)), (0, 0.0, (2,))),
    "large rewards": ((0, 1e12, (3,)), (0, -1e12, (2,))),
    "a trajectory without tokens": ((0, 1.0, (0,)), (0, 0.0, (3,))),
    "no episodes": (),
}


def make_columns(shape: Shape = USUAL, *, seed: int = 0, masked: bool = True) -> BatchColumns:
    """Columns with random log-probs, values and masks; every optional column is there. `masked` False: nothing
    trains."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = [length for _, _, trajectories in shape for length in trajectories]
    tokens = sum(lengths)
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    mask = torch.rand(tokens, generator=generator) > 0.3 if masked else torch.zeros(tokens, dtype=torch.bool)
    if masked:
        starts = offsets[:-1][offsets.diff() > 0]
        mask[starts] = True  # every trajectory with tokens has one that trains

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(tokens, generator=generator)

    def likeliest() -> torch.Tensor:
        """Log-probs [N, 3] of three of five outcomes."""
        return torch.randn(tokens, 5, generator=generator).log_softmax(-1)[:, :3]

    rollout = uniform(-3, 0)
    return BatchColumns(
        offsets=offsets,
        episode_of=torch.tensor([e for e, (_, _, ts) in enumerate(shape) for _ in ts], dtype=torch.int64),
        group_of=torch.tensor([group for group, _, _ in shape], dtype=torch.int64),
        rewards=torch.tensor([reward for _, reward, _ in shape], dtype=torch.float64),
        truncated=torch.tensor([i % 3 == 1 for i in range(len(lengths))], dtype=torch.bool),
        loss_mask=mask,
        rollout_logprobs=rollout.where(mask, rollout.new_zeros(())),
        versions=torch.where(mask, 3, -1).to(torch.int32),
        policy_version=4,
        old_logprobs=rollout + uniform(-1.5, 1.5),
        reference_logprobs=uniform(-3, 0),
        teacher_logprobs=uniform(-3, 0),
        values=uniform(-1, 1),
        teacher_top_ids=torch.arange(3).expand(tokens, 3),
        teacher_top_logprobs=likeliest(),
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
    )


def permuted(columns: BatchColumns, order: Sequence[int]) -> tuple[BatchColumns, torch.Tensor]:
    """The same batch with its trajectories in another order and its episodes and groups numbered backwards; and, for
    each token of the new batch, its place in the old one."""
    import torch

    bounds = columns.offsets.tolist()
    places = torch.tensor([t for s in order for t in range(bounds[s], bounds[s + 1])], dtype=torch.int64)
    lengths = columns.offsets.diff()[torch.tensor(order)]
    episodes, groups = len(columns.group_of), int(columns.group_of.max()) + 1
    moved: dict[str, Any] = {}
    for name in (
        "loss_mask",
        "rollout_logprobs",
        "versions",
        "old_logprobs",
        "reference_logprobs",
        "teacher_logprobs",
        "teacher_top_ids",
        "teacher_top_logprobs",
    ):
        moved[name] = getattr(columns, name)[places]
    assert columns.values is not None
    changed = dataclasses.replace(
        columns,
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        episode_of=episodes - 1 - columns.episode_of[torch.tensor(order)],
        group_of=groups - 1 - columns.group_of.flip(0),
        rewards=columns.rewards.flip(0),
        truncated=columns.truncated[torch.tensor(order)],
        values=columns.values[places],
        trajectory_ids=tuple(columns.trajectory_ids[s] for s in order),
        **moved,
    )
    return changed, places


def make_micro_batch(*, seed: int = 0) -> MicroBatch:
    """The usual columns as a loss term sees them; `logprobs`, `entropy`, `values` and `top_logprobs` are leaves with
    gradients."""
    import torch

    columns = make_columns(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = len(columns.loss_mask)
    assert columns.old_logprobs is not None
    return MicroBatch(
        offsets=columns.offsets,
        loss_mask=columns.loss_mask,
        logprobs=(columns.old_logprobs + 0.3 * torch.randn(tokens, generator=generator)).requires_grad_(),
        old_logprobs=columns.old_logprobs,
        rollout_logprobs=columns.rollout_logprobs,
        advantages=torch.randn(tokens, generator=generator).where(columns.loss_mask, torch.zeros(())),
        corrections=0.5 + torch.rand(tokens, generator=generator),
        entropy=(1 + torch.rand(tokens, generator=generator)).requires_grad_(),
        values=torch.randn(tokens, generator=generator).requires_grad_(),
        old_values=columns.values,
        returns=torch.randn(tokens, generator=generator),
        reference_logprobs=columns.reference_logprobs,
        teacher_logprobs=columns.teacher_logprobs,
        top_logprobs=torch.randn(tokens, 5, generator=generator).log_softmax(-1)[:, :3].requires_grad_(),
        teacher_top_logprobs=columns.teacher_top_logprobs,
    )


def with_needs(batch: MicroBatch, needs: Needs) -> MicroBatch:
    """The batch with the columns alone that `needs` asks for, as a backend gives them."""
    keep = {
        "entropy": Needs.ENTROPY in needs,
        "values": Needs.VALUES in needs,
        "old_values": Needs.VALUES in needs,
        "returns": Needs.VALUES in needs,
        "reference_logprobs": Needs.REFERENCE in needs,
        "teacher_logprobs": Needs.TEACHER in needs,
        "top_logprobs": Needs.TEACHER_TOP in needs,
        "teacher_top_logprobs": Needs.TEACHER_TOP in needs,
    }
    dropped: dict[str, Any] = {name: None for name, kept in keep.items() if not kept}
    return dataclasses.replace(batch, **dropped)


def micro_part(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Trajectories `first` to `last` − 1 of the batch."""
    start, stop = int(batch.offsets[first]), int(batch.offsets[last])
    columns: dict[str, Any] = {
        field.name: None if value is None else value[start:stop]
        for field in dataclasses.fields(batch)
        if field.name != "offsets"
        for value in [getattr(batch, field.name)]
    }
    return MicroBatch(offsets=batch.offsets[first : last + 1] - start, **columns)
