"""A batch packed for another process is the batch that comes out there."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data.group import Batch, Episode, Group, Prompt
from miles_core.data.packed import pack_batch, pack_trajectories, unpack_batch, unpack_trajectories
from miles_core.data.trajectory import Status, Trajectory, Turn


def trajectory(episode: str, index: int, prompt: int, sampled: int, optional: bool) -> Trajectory:
    length = prompt + sampled
    versions = np.array([-1] * prompt + [3] * sampled, np.int32)
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=versions >= 0,
        logprobs=np.where(versions >= 0, -0.5, 0.0).astype(np.float32),
        versions=versions,
        prompt_id="p",
        group_id="g",
        episode_id=episode,
        trajectory_id=f"{episode}.{index}",
        turns=(Turn(start=prompt, stop=length, finish_reason="stop", engine="e", request_id="r"),),
        reward={"a": 1.0} if optional else 0.5,
        status=Status.TRUNCATED,
        weights=np.full(length, 0.5, np.float32) if optional else None,
        teacher_top_ids=np.ones((length, 2), np.int32) if optional else None,
        teacher_top_logprobs=np.full((length, 2), -1.0, np.float32) if optional else None,
        routed_experts=np.zeros((max(length - 1, 0), 1, 2), np.int16) if optional else None,
    )


shapes = st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=3), max_size=4)


def batch_of(shape: list[list[tuple[int, int, bool]]]) -> Batch:
    prompt = Prompt(prompt_id="p", messages=({"role": "user", "content": "hi"},), label="x")
    episodes = tuple(
        Episode(
            episode_id=f"g.0/{e}",
            prompt_id="p",
            group_id="g",
            status=Status.COMPLETED if own else Status.FAILED,
            trajectories=tuple(trajectory(f"g.0/{e}", k, *one) for k, one in enumerate(own)),
            reward=0.5 if own else None,
            error="" if own else "it broke",
            metrics={"turns": 1.0},
            messages=(*prompt.messages, {"role": "assistant", "content": "ho"}),
        )
        for e, own in enumerate(shape)
    )
    return Batch(groups=(Group(group_id="g", prompt=prompt, episodes=episodes),), policy_version=3, step=2)


def plain(item: object) -> object:
    """With lists for arrays, their dtypes beside them: what `==` can compare."""
    if isinstance(item, np.ndarray):
        return item.dtype, item.shape, item.tolist()
    if dataclasses.is_dataclass(item):
        return type(item), {f.name: plain(getattr(item, f.name)) for f in dataclasses.fields(item)}
    return tuple(map(plain, item)) if isinstance(item, tuple) else item


@settings(max_examples=60, deadline=None)
@given(shape=shapes)
def test_nothing_is_lost_or_changed(shape: list[list[tuple[int, int, bool]]]) -> None:
    batch = batch_of(shape)
    arrived = unpack_batch(pickle.loads(pickle.dumps(pack_batch(batch))))
    assert plain(arrived) == plain(batch)
    alone = unpack_trajectories(pickle.loads(pickle.dumps(pack_trajectories(batch.trajectories))))
    assert plain(tuple(alone)) == plain(batch.trajectories)


def test_what_arrives_is_read_only() -> None:
    arrived = unpack_batch(pickle.loads(pickle.dumps(pack_batch(batch_of([[(2, 2, False)]])))))
    with pytest.raises(ValueError, match="read-only"):
        arrived.trajectories[0].token_ids[0] = 7
