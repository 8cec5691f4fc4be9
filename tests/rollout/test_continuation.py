"""Interrupted generations: whatever is cut wherever, the episode sees the generation of an engine that was not."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.engines import Generation, Sampling
from miles_core.contracts.environments import EpisodeTask
from miles_core.data.group import Episode
from miles_core.data.trajectory import Status
from miles_core.errors import EngineError
from miles_core.rollout.admission import AdmissionClient, EngineHold
from miles_core.rollout.continuation import joined, remainder
from miles_core.rollout.episodes import run_episode
from miles_core.rollout.recorder import TrajectoryRecorder

END = 0


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


class CuttingEngine:
    """Every token is a function of the ids before it. Request k ends after `cuts[k]` tokens, aborted: on purpose, or
    (`own`) by itself. `cached` tokens of a prompt need no row of routed experts."""

    def __init__(self, cuts: Sequence[int], *, own: bool = False, routed: bool = True, cached: int = 0) -> None:
        self.cuts = list(cuts)
        self.own = own
        self.routed = routed
        self.cached = cached
        self.interruptions = 0
        self.version = 0
        self.asked: list[tuple[list[int], Sampling]] = []

    def token(self, ids: Sequence[int]) -> int:
        return (ids[-1] * 3 + sum(ids) + len(ids) * len(ids) // 3) % 5

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> Generation:
        await asyncio.sleep(0)
        number = len(self.asked)
        self.asked.append((list(input_ids), sampling))
        cut = self.cuts[number] if number < len(self.cuts) else None
        ids, out, reason = list(input_ids), [], "abort"
        while cut is None or len(out) < cut:
            token = self.token(ids)
            ids.append(token)
            out.append(token)
            if on_tokens is not None:
                on_tokens(list(out))
            if token in sampling.stop_token_ids or any(stop in decode(out) for stop in sampling.stop):
                reason = "stop"
                break
            if len(out) == sampling.max_new_tokens:
                reason = "length"
                break
        if reason == "abort" and not self.own:
            self.interruptions += 2
            self.version += 1
        start = min(self.cached, len(input_ids) - 1)
        rows = np.arange(start, len(ids) - 1, dtype=np.int32)[:, None, None]
        return Generation(
            token_ids=np.array(out, np.int32),
            logprobs=np.array([-(i + 1) / 8 for i in ids[len(input_ids) :]], np.float32),
            versions=np.full(len(out), self.version if reason != "abort" or self.own else self.version - 1, np.int32),
            finish_reason=reason,
            engine="http://engine",
            prompt_tokens=len(input_ids),
            cached_tokens=start,
            started=float(number),
            finished=number + 0.5,
            text=decode(out),
            routed_experts=rows if self.routed and out else None,
            routed_start=start,
            request_id=f"r{number}",
        )

    async def interrupt(self) -> None:
        self.interruptions += 2

    def forget(self, routing_key: str) -> None: ...


def ask(engine: CuttingEngine, sampling: Sampling, prompt: Sequence[int] = (1, 2, 3), **how: object) -> Generation:
    hold = EngineHold(engine, partial=True, decode=decode)
    return asyncio.run(AdmissionClient(hold, priority=0).generate(list(prompt), sampling, **how))  # type: ignore[arg-type]


@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 6), max_size=5),
    limit=st.integers(1, 14),
    stop=st.lists(st.text("abcde", min_size=1, max_size=4), max_size=2),
    ends=st.booleans(),
    cached=st.integers(0, 6),
)
def test_an_interrupted_generation_is_the_uninterrupted_one(
    prompt: list[int], cuts: list[int], limit: int, stop: list[str], ends: bool, cached: int
) -> None:
    sampling = Sampling(
        max_new_tokens=limit, stop=tuple(stop), stop_token_ids=(END,) if ends else (), seed=3, temperature=0.5
    )
    engine = CuttingEngine(cuts, cached=cached)
    heard: list[list[int]] = []
    found = ask(engine, sampling, prompt, on_tokens=lambda ids: heard.append(list(ids)))
    whole = ask(CuttingEngine([], cached=cached), sampling, prompt)
    for column in ("token_ids", "logprobs", "routed_experts"):
        assert np.array_equal(getattr(found, column), getattr(whole, column)), column
    for field in ("finish_reason", "prompt_tokens", "cached_tokens", "routed_start", "text"):
        assert getattr(found, field) == getattr(whole, field), field
    assert (np.diff(found.versions) >= 0).all()
    assert all(ids == found.token_ids.tolist()[: len(ids)] for ids in heard if len(ids) <= len(found.token_ids))
    assert [len(ids) for ids in heard] == sorted(len(ids) for ids in heard)
    assert found.request_id == "+".join(f"r{k}" for k in range(len(engine.asked)))
    for number, (ids, asked) in enumerate(engine.asked):
        sampled = len(ids) - len(prompt)
        assert ids[: len(prompt)] == prompt
        assert asked.max_new_tokens == limit - sampled, f"request {number} asks for what is left"
        assert asked.seed == remainder(sampling, sampled).seed


def test_a_stop_string_across_a_cut_ends_the_generation_where_an_engine_would() -> None:
    whole = ask(CuttingEngine([]), Sampling(max_new_tokens=12)).text
    stop = whole[3:6]
    assert stop not in whole[:5]
    found = ask(CuttingEngine([5]), Sampling(max_new_tokens=12, stop=(stop,)))
    assert (found.text, found.finish_reason) == (whole[:6], "stop")
    assert found.routed_experts is not None
    assert len(found.routed_experts) == 3 + 6 - 1


def test_an_abort_that_nobody_asked_for_stays_one() -> None:
    engine = CuttingEngine([2], own=True)
    assert ask(engine, Sampling(max_new_tokens=8)).finish_reason == "abort"
    assert len(engine.asked) == 1


def test_without_partial_an_interruption_ends_the_generation() -> None:
    engine = CuttingEngine([2])
    client = AdmissionClient(EngineHold(engine), priority=0)
    found = asyncio.run(client.generate([1], Sampling(max_new_tokens=8)))
    assert (found.finish_reason, len(found.token_ids)) == ("abort", 2)


def test_an_interruption_before_the_first_token_changes_nothing() -> None:
    engine = CuttingEngine([0, 0])
    sampling = Sampling(max_new_tokens=4, seed=9)
    found = ask(engine, sampling)
    assert [asked for _, asked in engine.asked] == [sampling] * 3
    assert found.versions.tolist() == [2, 2, 2, 2]


def test_an_interruption_at_the_limit_is_the_limit() -> None:
    engine = CuttingEngine([4])
    found = ask(engine, Sampling(max_new_tokens=5))
    assert (found.finish_reason, len(found.token_ids)) == ("length", 5)
    first = dataclasses.replace(found, finish_reason="abort")
    again = joined(
        [first, dataclasses.replace(first, token_ids=first.token_ids[:0])], Sampling(max_new_tokens=5), decode
    )
    assert again.finish_reason == "length"


@pytest.mark.parametrize("lost", [0, -1])
def test_a_missing_row_of_routed_experts_is_refused_and_not_padded(lost: int) -> None:
    class Forgetful(CuttingEngine):
        async def generate(self, *arguments: object, **named: object) -> Generation:
            found = await super().generate(*arguments, **named)  # type: ignore[arg-type]
            if len(self.asked) == 1 or found.routed_experts is None:
                return found
            covered = 3 + 2 - 1
            rows = found.routed_experts[covered + 1 :] if lost == 0 else found.routed_experts[:-1]
            return dataclasses.replace(found, routed_experts=rows, routed_start=covered + 1 if lost == 0 else 0)

    with pytest.raises(EngineError, match="a missing row is never padded"):
        ask(Forgetful([2]), Sampling(max_new_tokens=6))


def test_the_recorder_takes_a_joined_generation_as_one_turn(make_task: Callable[..., EpisodeTask]) -> None:
    recorder = TrajectoryRecorder(make_task())
    recorder.append_prompt([1, 2, 3])
    recorder.append_generation(ask(CuttingEngine([2, 3]), Sampling(max_new_tokens=8)))
    trajectory = recorder.build(Status.COMPLETED)
    assert trajectory.versions.tolist() == [-1] * 3 + [0] * 2 + [1] * 3 + [2] * 3
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts[:, 0, 0].tolist() == list(range(10))
    assert [(t.start, t.stop, t.request_id) for t in trajectory.turns] == [(3, 11, "r0+r1+r2")]


def test_a_parked_episode_waits_and_its_deadline_with_it(make_task: Callable[..., EpisodeTask]) -> None:
    class OneTurn:
        async def generate(self, task: EpisodeTask, engine: AdmissionClient) -> Episode:
            found = await engine.generate([1, 2, 3], task.sampling)
            recorder = TrajectoryRecorder(task)
            recorder.append_prompt([1, 2, 3])
            recorder.append_generation(found)
            return Episode(
                episode_id=task.episode_id,
                prompt_id=task.prompt.prompt_id,
                group_id=task.group_id,
                status=Status.COMPLETED,
                trajectories=(recorder.build(Status.COMPLETED),),
            )

    async def go() -> tuple[bool, Episode]:
        engine = CuttingEngine([])
        hold = EngineHold(engine, partial=True, decode=decode)
        await hold.park()
        client = AdmissionClient(hold, priority=0)
        running = asyncio.create_task(run_episode(OneTurn(), make_task(max_new_tokens=3), client, timeout=0.2))  # type: ignore[arg-type]
        await asyncio.sleep(0.4)
        waiting = not running.done() and not engine.asked
        hold.resume()
        return waiting, await running

    waiting, episode = asyncio.run(go())
    assert waiting, "past its deadline by the clock, and parked all the time"
    assert episode.status is Status.COMPLETED


def test_evaluation_is_not_parked() -> None:
    async def go() -> Generation:
        hold = EngineHold(CuttingEngine([]), partial=True, decode=decode)
        await hold.park()
        return await AdmissionClient(hold, priority=0, parks=False).generate([1], Sampling(max_new_tokens=2))

    assert len(asyncio.run(asyncio.wait_for(go(), 5)).token_ids) == 2
