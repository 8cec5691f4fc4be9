"""Laws of generate environments: trajectories are what the engine sampled, and a cancelled episode leaves nothing.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np

from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import EpisodeTask, GenerateEnvironment
from miles_core.data.group import Episode, Prompt
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.data.trajectory import NOT_SAMPLED, Status
from miles_core.errors import MilesError
from miles_core.testing.kit import Case, Check
from miles_core.testing.leftovers import leftover_tasks
from miles_core.testing.scripted import ScriptedClient
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily

__all__ = ["CHECKS"]


async def trajectories_are_what_was_sampled(case: Case) -> None:
    episode, engine, _ = await _run(case, "hello\n\n4", "stop")
    assert episode.trajectories, "a completed episode has no trajectory"
    answers = {one.generation.request_id: one for one in engine.asked}
    seen = set()
    for trajectory in episode.trajectories:
        sampled = np.zeros(len(trajectory), np.bool_)
        for turn in trajectory.turns:
            assert turn.request_id in answers, f"turn {turn.request_id!r} is none of the engine's requests"
            seen.add(turn.request_id)
            asked = answers[turn.request_id]
            start, stop, generation = turn.start, turn.stop, asked.generation
            sampled[start:stop] = True
            assert tuple(trajectory.token_ids[:start].tolist()) == asked.input_ids, (
                f"the tokens before turn {turn.request_id} are not those that the engine was sent"
            )
            for name in ("token_ids", "logprobs", "versions"):
                kept, given = getattr(trajectory, name)[start:stop], getattr(generation, name)[: stop - start]
                assert np.array_equal(kept, given), f"{name} of turn {turn.request_id} are not those of the engine"
        assert np.array_equal(trajectory.versions != NOT_SAMPLED, sampled), (
            "tokens outside the turns carry a version, or tokens of a turn none"
        )
    assert seen == set(answers), f"{len(answers) - len(seen)} of the engine's generations are in no trajectory"


async def what_the_engine_sampled_trains(case: Case) -> None:
    episode, _, _ = await _run(case, "hello", "stop")
    trained = sum(trajectory.trainable_tokens for trajectory in episode.trajectories)
    assert trained, "no token of a completed episode trains"


async def status_follows_the_finish_reason(case: Case) -> None:
    for reason, status in (("stop", "completed"), ("length", "truncated"), ("abort", "aborted")):
        episode, _, _ = await _run(case, "hello", reason)
        assert episode.status == status, f"a generation that ended by {reason!r} makes an episode {episode.status!r}"
        assert all(t.status == status for t in episode.trajectories), f"its trajectories are not {status!r}"


async def ids_are_those_of_the_task(case: Case) -> None:
    episode, _, task = await _run(case, "hello", "stop")
    found = (episode.episode_id, episode.group_id, episode.prompt_id)
    expected = (task.episode_id, task.group_id, task.prompt.prompt_id)
    assert found == expected, f"the episode carries the ids {found}, its task {expected}"
    names = [t.trajectory_id for t in episode.trajectories]
    assert len(set(names)) == len(names), f"trajectories share an id: {names}"
    assert all(t.prompt_id == task.prompt.prompt_id for t in episode.trajectories), "a trajectory has another prompt_id"


async def the_conversation_is_kept(case: Case) -> None:
    episode, _, task = await _run(case, "hello 4", "stop")
    said = list(episode.messages)
    assert said[: len(task.prompt.messages)] == list(task.prompt.messages), "messages do not begin with the prompt"
    assert said[-1].get("role") == "assistant", f"the last message is {said[-1]}, expected the model's"
    assert "hello 4" in str(said[-1].get("content")), f"the model said 'hello 4', the messages end with {said[-1]}"


async def max_tokens_bounds_a_trajectory(case: Case) -> None:
    long, _, _ = await _run(case, "hello", "stop")
    limit = long.trajectories[0].prompt_length + 2
    episode, _, _ = await _run(case, "hello hello hello", "stop", max_tokens=limit)
    longest = max(len(t) for t in episode.trajectories)
    assert longest <= limit, f"a trajectory has {longest} tokens under max_tokens {limit}"
    assert episode.status == Status.TRUNCATED, f"an episode cut by max_tokens is {episode.status!r}, not truncated"


async def equal_tasks_make_equal_requests(case: Case) -> None:
    asked = [(await _run(case, "hello", "stop"))[1].asked for _ in range(2)]
    first, second = ([(one.input_ids, one.sampling) for one in run] for run in asked)
    assert first == second, "the same task makes other requests the second time: a resumed run would differ"
    assert all(sampling.seed is not None for _, sampling in first), (
        "a request has no seed: use task.turn_seed(turn), so that a resumed run samples the same"
    )


async def cancellation_leaves_nothing(case: Case) -> None:
    environment, tokenizer = _bound(case)
    engine = ScriptedClient(tokenizer.encode("4"), hang=True)
    before = asyncio.all_tasks()
    episode = asyncio.create_task(environment.generate(_task(), engine))
    for _ in range(1000):
        if engine.waiting or episode.done():
            break
        await asyncio.sleep(0.01)
    assert engine.waiting, "the episode asks nothing of the engine"
    episode.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await episode
    assert episode.cancelled(), "generate() swallows its cancellation"
    assert not engine.waiting, "a request stays open at the engine after its episode was cancelled"
    left = leftover_tasks(before)
    assert not left, f"tasks of a cancelled episode run on: {left}"


async def a_dead_engine_is_no_sample(case: Case) -> None:
    environment, tokenizer = _bound(case)
    try:
        episode = await environment.generate(_task(), ScriptedClient(tokenizer.encode("4"), down=True))
    except MilesError:
        return
    except Exception as error:
        raise AssertionError(
            f"a dead engine raises {type(error).__name__}: {error}; let its EngineError through, or raise "
            "EnvironmentFailure"
        ) from error
    assert episode.status == Status.FAILED, f"an episode whose engine is dead is {episode.status!r}, not failed"


CHECKS: tuple[Check, ...] = (
    trajectories_are_what_was_sampled,
    what_the_engine_sampled_trains,
    status_follows_the_finish_reason,
    ids_are_those_of_the_task,
    the_conversation_is_kept,
    max_tokens_bounds_a_trajectory,
    equal_tasks_make_equal_requests,
    cancellation_leaves_nothing,
    a_dead_engine_is_no_sample,
)


def _task(max_tokens: int = 0) -> EpisodeTask:
    return EpisodeTask(
        prompt=Prompt(prompt_id="p:1", messages=({"role": "user", "content": "2 + 2?"},), label="4"),
        group_id="g",
        episode_id="g.0",
        sampling=Sampling(max_new_tokens=64),
        seed=7,
        max_tokens=max_tokens,
    )


def _bound(case: Case) -> tuple[GenerateEnvironment[Any], FileTokenizer]:
    tokenizer = load_tokenizer(case.tokenizer)
    environment: GenerateEnvironment[Any] = case.create()
    environment.bind(ChatMLFamily(ChatMLConfig()), tokenizer)
    return environment, tokenizer


async def _run(
    case: Case, reply: str, reason: str, *, max_tokens: int = 0
) -> tuple[Episode, ScriptedClient, EpisodeTask]:
    """One episode whose engine says `reply`, one byte a token where the vocabulary would merge them."""
    environment, tokenizer = _bound(case)
    ids = [i for character in reply for i in tokenizer.encode(character)]
    engine = ScriptedClient([*ids, tokenizer.special("<|im_end|>")] if reason == "stop" else ids, reason)
    task = _task(max_tokens)
    return await environment.generate(task, engine), engine, task
