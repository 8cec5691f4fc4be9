"""Which groups are dropped, and which noise is no signal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.trajectory import Status
from miles_core.rollout.filters import NoAborted, NoAbortedConfig, NonzeroStd, NonzeroStdConfig

PROMPT = Prompt(prompt_id="p", messages=())


def group(*statuses: Status) -> Group:
    episodes = [
        Episode(episode_id=f"g.{i}", prompt_id="p", group_id="g", status=status, trajectories=())
        for i, status in enumerate(statuses)
    ]
    return Group(group_id="g", prompt=PROMPT, episodes=tuple(episodes))


def dropped(*rewards: float) -> bool:
    return NonzeroStd(NonzeroStdConfig()).drop_reason(group(), list(rewards)) == "zero_std"


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, 0.95, -3.0, 1e-30])
def test_constant_groups_are_dropped_whatever_their_mean(value: float):
    assert dropped(*[value] * 8)


def test_float_noise_is_no_signal():
    noisy = [float(np.float32(0.95) + i * np.spacing(np.float32(0.95))) for i in range(8)]
    assert len(set(noisy)) == 8
    assert dropped(*noisy)


def test_one_that_differs_is_signal():
    assert not dropped(0.0, *[0.95] * 7)
    assert not dropped(1e-9, 2e-9)
    assert not dropped(-1.0, 1.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.sampled_from([0.25, 2.0, 1024.0, -4.0]))
def test_scale_does_not_matter(rewards: list[float], scale: float):
    normal = [0.0 if abs(reward) < 1e-200 else reward for reward in rewards]
    assert dropped(*normal) == dropped(*(reward * scale for reward in normal))


def test_groups_too_small_to_compare_are_dropped():
    assert dropped(1.0)
    assert dropped()


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ((Status.COMPLETED, Status.TRUNCATED), None),
        ((Status.COMPLETED, Status.ABORTED), "aborted"),
        ((Status.FAILED, Status.ABORTED), "failed"),
    ],
)
def test_no_aborted(statuses: tuple[Status, ...], reason: str | None):
    assert NoAborted(NoAbortedConfig()).drop_reason(group(*statuses), []) == reason
