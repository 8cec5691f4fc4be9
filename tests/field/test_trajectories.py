"""Kinds of faults in what is carried from engine to trainer: the right behaviour."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from miles_core.data.group import Batch, Episode, Group, Prompt
from miles_core.data.parquet import read_rollouts, write_rollouts
from miles_core.data.trajectory import Status, Trajectory, Turn
from miles_core.engines.wire import parse_generation
from miles_core.errors import EngineError


def trajectory(ids: list[int], versions: list[int], **fields: object) -> Trajectory:
    sampled = np.array(versions) >= 0
    defaults: dict[str, object] = {
        "token_ids": np.array(ids),
        "loss_mask": sampled,
        "logprobs": np.where(sampled, -0.5, 0.0),
        "versions": np.array(versions),
        "prompt_id": "p",
        "group_id": "g",
        "episode_id": "g.0/0",
        "trajectory_id": "g.0/0.0",
        "reward": 1.0,
    }
    return Trajectory(**{**defaults, **fields})  # type: ignore[arg-type]


def batch(*trajectories: Trajectory, policy_version: int) -> Batch:
    groups = []
    for one in trajectories:
        prompt = Prompt(prompt_id="p", messages=())
        episode = Episode(
            episode_id=one.episode_id,
            prompt_id="p",
            group_id=one.group_id,
            status=one.status,
            trajectories=(one,),
            reward=1.0,
        )
        groups.append(Group(group_id=one.group_id, prompt=prompt, episodes=(episode,)))
    return Batch(groups=tuple(groups), policy_version=policy_version, step=policy_version)


def test_ids_that_decode_and_encode_to_other_ids_are_kept(tmp_path: Path) -> None:
    """["he", "llo"] is never turned into ["hello"]: nothing between engine and trainer decodes."""
    sampled = trajectory([5, 10, 11], [-1, 0, 0], turns=(Turn(start=1, stop=3, finish_reason="stop", engine="e"),))
    write_rollouts(tmp_path / "r.parquet", [sampled], step=1, policy_version=0)
    (read,) = read_rollouts(tmp_path / "r.parquet")
    assert read.token_ids.tolist() == [5, 10, 11]
    assert read.turns == sampled.turns


@pytest.mark.parametrize(("ids", "versions"), [([7, 2], [-1, 0]), ([7], [-1])], ids=["lone end", "empty"])
def test_a_lone_end_and_an_empty_answer_are_defined(ids: list[int], versions: list[int], tmp_path: Path) -> None:
    one = trajectory(ids, versions)
    assert one.trainable_tokens == len(ids) - 1
    assert one.prompt_length == 1
    write_rollouts(tmp_path / "r.parquet", [one], step=1, policy_version=0)
    assert read_rollouts(tmp_path / "r.parquet")[0].trainable_tokens == one.trainable_tokens


def test_a_real_end_token_is_not_taken_for_padding(tmp_path: Path) -> None:
    """With pad = end of sequence, "not pad" would drop the end that was sampled; masks are carried instead."""
    one = trajectory([7, 3, 2], [-1, 0, 0])
    write_rollouts(tmp_path / "r.parquet", [one, trajectory([7, 9], [-1, 0])], step=1, policy_version=0)
    assert read_rollouts(tmp_path / "r.parquet")[0].loss_mask.tolist() == [False, True, True]


def test_a_trajectory_of_several_versions_is_as_old_as_its_oldest_token() -> None:
    mixed = trajectory([1, 2, 3, 4], [-1, 6, 2, 4])
    assert mixed.oldest_version == 2
    assert batch(mixed, policy_version=6).staleness() == [4]


def test_staleness_of_a_batch_is_that_of_what_it_trains() -> None:
    """Dropped groups are not in a batch, so they cannot be in its staleness."""
    assert batch(trajectory([1, 2], [-1, 3]), policy_version=3).staleness() == [0]


def test_a_missing_row_of_routed_experts_is_an_error_and_not_expert_zero() -> None:
    with pytest.raises(ValueError, match="never padded"):
        trajectory([1, 2, 3], [-1, 0, 0], routed_experts=np.zeros((1, 2, 2), np.int16))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": np.array([0.0, np.nan])}, "log-prob of token 1 is nan"),
        ({"logprobs": np.array([0.0, 0.5])}, "above 0"),
        ({"logprobs": np.array([-1.0, -1.0])}, "was not sampled but has a log-prob"),
        ({"loss_mask": np.array([True, True])}, "trains but has no version"),
        ({"versions": np.array([-1])}, "versions has 1 tokens"),
        ({"token_ids": np.array([-1, 2])}, "negative token id"),
        ({"turns": (Turn(start=1, stop=5, finish_reason="stop", engine="e"),)}, "outside 2 tokens"),
    ],
)
def test_columns_that_disagree_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(trajectory([1, 2], [-1, 0]), **fields)  # type: ignore[arg-type]


def test_columns_are_immutable() -> None:
    one = trajectory([1, 2], [-1, 0])
    with pytest.raises(ValueError, match="read-only"):
        one.token_ids[0] = 9


def test_a_reward_of_an_infrastructure_failure_does_not_exist() -> None:
    failed = Episode(
        episode_id="e", prompt_id="p", group_id="g", status=Status.FAILED, trajectories=(), error="engine down"
    )
    assert failed.reward is None
    assert failed.oldest_version is None


def answer(**meta: object) -> dict[str, object]:
    base = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5, 11, None], [-0.25, 12, None]],
    }
    return {"output_ids": [11, 12], "text": "", "meta_info": {**base, **meta}}


def test_versions_come_from_the_engines_spans() -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    generation = parse_generation(answer(weight_versions=spans), engine="e", started=0, finished=1)
    assert generation.versions.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_logprobs": [[-0.5, 11, None]]}, "2 sampled ids but log-probs of 1"),
        ({"output_token_logprobs": [[-0.5, 11, None], [-0.5, 13, None]]}, "do not match"),
        ({"output_token_logprobs": [[-0.5, 11, None], [None, 12, None]]}, "not finite"),
        ({"finish_reason": {"type": "eos"}}, "unknown finish reason"),
        ({"finish_reason": None}, "not a generation"),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 1}]}, "do not cover"),
    ],
)
def test_an_answer_that_does_not_fit_itself_is_refused(meta: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_generation(answer(**meta), engine="e", started=0, finished=1)
