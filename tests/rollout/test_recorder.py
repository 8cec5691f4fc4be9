"""Turns to a trajectory: what the engine said and nothing else, cut where it must be, never filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.contracts.engines import Generation
from miles_core.contracts.environments import EpisodeTask
from miles_core.data.trajectory import Status, Trajectory
from miles_core.errors import EnvironmentFailure
from miles_core.rollout.recorder import TrajectoryRecorder, status_of

Make = Callable[..., EpisodeTask]


def generation(prompt: int, ids: list[int], reason: str = "stop", **fields: Any) -> Generation:
    defaults: dict[str, Any] = {
        "token_ids": np.array(ids, np.int32),
        "logprobs": np.array([-0.1 - i / 100 for i in ids], np.float32),
        "versions": np.array([i % 5 for i in ids], np.int32),
        "finish_reason": reason,
        "engine": "e",
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "started": 0.0,
        "finished": 1.0,
    }
    return Generation(**(defaults | fields))


turns = st.lists(
    st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), max_size=4)),
    min_size=1,
    max_size=4,
)


def record(
    task: EpisodeTask, script: list[tuple[list[int], list[int]]], status: Status = Status.COMPLETED
) -> Trajectory:
    recorder = TrajectoryRecorder(task)
    for injected, sampled in script:
        recorder.append_prompt(injected)
        recorder.append_generation(generation(len(recorder.ids), sampled))
    return recorder.build(status)


@settings(max_examples=200, deadline=None)
@given(script=turns, limit=st.integers(0, 30))
def test_equals_an_obvious_reference(make_task: Make, script: list[tuple[list[int], list[int]]], limit: int):
    flat = [
        (token, sampled)
        for injected, said in script
        for sampled, part in ((False, injected), (True, said))
        for token in part
    ]
    total = sum(sampled for _, sampled in flat)
    kept = flat[:limit] if limit else flat
    if not any(sampled for _, sampled in kept):
        kept = kept if total else flat
    while any(sampled for _, sampled in kept) and not kept[-1][1]:
        kept = kept[:-1]
    lost = sum(sampled for _, sampled in kept) < total

    made = record(make_task(max_tokens=limit), script)
    assert made.token_ids.tolist() == [token for token, _ in kept]
    assert made.loss_mask.tolist() == [sampled for _, sampled in kept]
    assert made.status is (Status.TRUNCATED if lost else Status.COMPLETED)
    np.testing.assert_array_equal(made.logprobs, np.array([-0.1 - t / 100 if s else 0.0 for t, s in kept], np.float32))
    assert made.versions.tolist() == [t % 5 if s else -1 for t, s in kept]
    covered = [i for turn in made.turns for i in range(turn.start, turn.stop)]
    assert covered == np.flatnonzero(made.loss_mask).tolist()


def test_ids_are_stable_and_names_the_trajectory(make_task: Make):
    made = record(make_task(), [([1, 2], [3])])
    assert (made.trajectory_id, made.episode_id, made.group_id, made.prompt_id) == ("g.0.0", "g.0", "g", "p:1")


def test_empty_completion_keeps_the_prompt_and_trains_nothing(make_task: Make):
    made = record(make_task(), [([1, 2], [])], Status.ABORTED)
    assert made.token_ids.tolist() == [1, 2]
    assert made.trainable_tokens == 0
    assert made.status is Status.ABORTED
    assert [(turn.start, turn.stop) for turn in made.turns] == [(2, 2)]


def test_a_turn_cut_by_max_tokens_ended_by_length(make_task: Make):
    made = record(make_task(max_tokens=4), [([1, 2], [3, 4, 5])])
    assert [(turn.stop, turn.finish_reason) for turn in made.turns] == [(4, "length")]
    assert record(make_task(max_tokens=4), [([1, 2], [3, 4, 5])], Status.ABORTED).status is Status.ABORTED


def test_junction_drops_sampled_and_adds_unsampled(make_task: Make):
    recorder = TrajectoryRecorder(make_task())
    recorder.append_prompt([1])
    recorder.append_generation(generation(1, [5, 6]))
    recorder.join(1, [9])
    recorder.append_generation(generation(3, [7]))
    made = recorder.build(Status.COMPLETED)
    assert made.token_ids.tolist() == [1, 5, 9, 7]
    assert made.loss_mask.tolist() == [False, True, False, True]
    assert [(t.start, t.stop) for t in made.turns] == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "2 ids, 1 log-probs and 2 versions"),
        ({"versions": np.zeros(3, np.int32)}, "2 ids, 2 log-probs and 3 versions"),
        ({"prompt_tokens": 4}, "counted 4 prompt tokens where 1 were sent"),
    ],
)
def test_columns_that_disagree_are_refused(make_task: Make, fields: dict[str, Any], reason: str):
    recorder = TrajectoryRecorder(make_task())
    recorder.append_prompt([1])
    with pytest.raises(EnvironmentFailure, match=reason):
        recorder.append_generation(generation(1, [5, 6], **fields))


def rows(start: int, stop: int, turn: int = 0) -> Any:
    """Routes that say which position and turn they are of."""
    return np.stack([np.full((2, 3), 100 * turn + i, np.int32) for i in range(start, stop)])


def routed(make_task: Make, *, second: Any, start: int) -> Trajectory:
    """Prompt of 2 tokens, 2 sampled, 1 injected, 2 sampled: 6 rows are needed, 3 come with the first turn."""
    recorder = TrajectoryRecorder(make_task())
    recorder.append_prompt([1, 2])
    recorder.append_generation(generation(2, [3, 4], routed_experts=rows(0, 3)))
    recorder.append_prompt([5])
    recorder.append_generation(generation(5, [6, 7], routed_experts=second, routed_start=start))
    return recorder.build(Status.COMPLETED)


def test_routes_are_stitched_and_the_sampled_ones_stay(make_task: Make):
    whole = routed(make_task, second=rows(0, 6, turn=1), start=0)
    rest = routed(make_task, second=rows(3, 6, turn=1), start=3)
    assert whole.routed_experts is not None
    assert rest.routed_experts is not None
    assert whole.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 103, 104, 105]
    np.testing.assert_array_equal(whole.routed_experts, rest.routed_experts)


@pytest.mark.parametrize(
    ("second", "start", "reason"),
    [
        (rows(4, 6), 4, "cover positions 4 up to 6, but rows 3 up to 6 are needed"),
        (rows(0, 5), 0, "cover positions 0 up to 5, but rows 3 up to 6"),
        (None, 0, "came with some turns and not with others"),
    ],
)
def test_a_missing_row_is_never_padded(make_task: Make, second: Any, start: int, reason: str):
    with pytest.raises(EnvironmentFailure, match=reason):
        routed(make_task, second=second, start=start)


def test_routes_that_start_with_the_second_turn_are_refused(make_task: Make):
    recorder = TrajectoryRecorder(make_task())
    recorder.append_prompt([1])
    recorder.append_generation(generation(1, [2]))
    with pytest.raises(EnvironmentFailure, match="some turns"):
        recorder.append_generation(generation(2, [3], routed_experts=rows(0, 2)))


def test_routes_are_cut_with_the_tokens(make_task: Make):
    recorder = TrajectoryRecorder(make_task(max_tokens=3))
    recorder.append_prompt([1])
    recorder.append_generation(generation(1, [2, 3, 4], routed_experts=rows(0, 3)))
    made = recorder.build(Status.COMPLETED)
    assert made.routed_experts is not None
    assert made.routed_experts.shape == (2, 2, 3)


def test_abort_during_prefill_has_no_routes_to_give(make_task: Make):
    recorder = TrajectoryRecorder(make_task())
    recorder.append_prompt([1, 2])
    recorder.append_generation(generation(2, [3], routed_experts=rows(0, 2)))
    recorder.append_prompt([4])
    recorder.append_generation(generation(0, [], "abort"))
    made = recorder.build(Status.ABORTED)
    assert made.token_ids.tolist() == [1, 2, 3]
    assert made.routed_experts is not None


def test_statuses():
    assert [status_of(r) for r in ("stop", "length", "abort")] == [Status.COMPLETED, Status.TRUNCATED, Status.ABORTED]
    with pytest.raises(EnvironmentFailure, match="ended a generation by 'tired'"):
        status_of("tired")


def test_versions_of_every_token_are_kept(make_task: Make):
    """An aborted generation that went on under other weights: its versions stay what they were."""
    recorder = TrajectoryRecorder(make_task())
    recorder.append_prompt([1])
    versions = np.repeat(np.array([2, 4, 6], np.int32), [2, 2, 8])
    said = dataclasses.replace(generation(1, list(range(12))), versions=versions)
    recorder.append_generation(said)
    made = recorder.build(Status.COMPLETED)
    assert made.versions.tolist() == [-1, *versions.tolist()]
    assert made.oldest_version == 2
