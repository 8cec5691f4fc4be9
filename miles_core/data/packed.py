"""A batch on its way to another process: one array a column instead of one a trajectory.

A batch of thousands of short trajectories is tens of thousands of small objects, and pickling looks at each. Here the
columns of all trajectories lie behind one another, and what arrives looks into them. Nothing is checked again: it was
when the trajectories were made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from miles_core.data.group import Batch, Episode, Group
from miles_core.data.trajectory import Trajectory, Turn

__all__ = ["Packed", "pack_batch", "pack_trajectories", "unpack_batch", "unpack_trajectories"]

_COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions")
_OTHERS = tuple(f.name for f in dataclasses.fields(Trajectory) if f.name not in (*_COLUMNS, "turns"))
_EPISODE = tuple(f.name for f in dataclasses.fields(Episode) if f.name != "trajectories")
_TURN = tuple(f.name for f in dataclasses.fields(Turn))

_set = object.__setattr__

Packed = tuple[Any, ...]
Item = TypeVar("Item")


def pack_trajectories(trajectories: Sequence[Trajectory]) -> Packed:
    """To be pickled; `unpack_trajectories` gives them back."""
    lengths = [len(t) for t in trajectories]
    columns = [np.concatenate([getattr(t, name) for t in trajectories]) if lengths else None for name in _COLUMNS]
    turns = [[_values(turn, _TURN) for turn in t.turns] for t in trajectories]
    return lengths, columns, turns, [_values(t, _OTHERS) for t in trajectories]


def unpack_trajectories(packed: Packed) -> list[Trajectory]:
    """Their columns are read-only views of arrays that they share."""
    lengths, columns, turns, others = packed
    for column in columns:
        if column is not None:
            column.flags.writeable = False
    made = []
    ends = accumulate(lengths)
    for length, end, own, other in zip(lengths, ends, turns, others, strict=True):
        trajectory = _made(Trajectory, _OTHERS, other)
        for name, column in zip(_COLUMNS, columns, strict=True):
            _set(trajectory, name, column[end - length : end])
        _set(trajectory, "turns", tuple([_made(Turn, _TURN, turn) for turn in own]))
        made.append(trajectory)
    return made


def pack_batch(batch: Batch) -> Packed:
    """To be pickled; `unpack_batch` gives it back."""
    groups = [
        (group.group_id, group.prompt, [_packed_episode(episode) for episode in group.episodes])
        for group in batch.groups
    ]
    return pack_trajectories(batch.trajectories), groups, batch.policy_version, batch.step


def unpack_batch(packed: Packed) -> Batch:
    """The batch, equal to the one that was packed."""
    trajectories, groups, policy_version, step = packed
    rest = iter(unpack_trajectories(trajectories))
    made = []
    for group_id, prompt, episodes in groups:
        unpacked = []
        for count, fields in episodes:
            episode = _made(Episode, _EPISODE, fields)
            _set(episode, "trajectories", tuple([next(rest) for _ in range(count)]))
            unpacked.append(episode)
        made.append(Group(group_id=group_id, prompt=prompt, episodes=tuple(unpacked)))
    return Batch(groups=tuple(made), policy_version=policy_version, step=step)


def _packed_episode(episode: Episode) -> tuple[int, tuple[Any, ...]]:
    return len(episode.trajectories), _values(episode, _EPISODE)


def _values(item: object, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple([getattr(item, name) for name in names])


def _made(kind: type[Item], names: Sequence[str], values: Sequence[Any]) -> Item:
    """As the constructor would, without its checks."""
    item = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        _set(item, name, value)
    return item
