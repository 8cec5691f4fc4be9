"""The math reward: equal mathematics scores 1 from a worker process, and no worker outlives the reward."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from miles_core.contracts.rewards import Sample
from miles_core.errors import RewardError
from miles_core.rollout.rewards.math import MathConfig, MathReward

pytest.importorskip("math_verify")
Make = Callable[..., Sample]


def pid(reward: MathReward) -> int:
    process = reward._workers[0]._process
    assert process is not None
    return process.pid


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


async def test_scores_errors_and_workers(make_sample: Make):
    """One worker for all of it: starting it is what takes time."""
    reward = MathReward(MathConfig())
    cases: list[tuple[str, Any, float]] = [
        (r"so \boxed{\frac{1}{3}}", "1/3", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        ("The answer is $x^2+1$", "$1 + x^2$", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{4}", 4, 1.0),
        (r"\boxed{5}", ["4", "5"], 1.0),
        (r"\boxed{5}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
    ]
    samples = [make_sample(response, label) for response, label, _ in cases]
    bad = [make_sample("1", None, episode="g.8"), make_sample("1", "", episode="g.9")]
    try:
        scores = await reward.score([*samples, *bad])
        assert scores[: len(cases)] == [score for _, _, score in cases]
        assert "episode g.8: prompt p:1: the label is None" in str(scores[-2])
        assert "episode g.9: " in str(scores[-1])
        assert all(isinstance(score, RewardError) for score in scores[-2:])

        # From a thread that is not the main one: nothing here uses signals.
        assert await asyncio.to_thread(lambda: asyncio.run(_apart(samples[0]))) == [1.0]

        # A worker that dies fails what it was doing, and is replaced.
        os.kill(pid(reward), signal.SIGKILL)
        await asyncio.sleep(0.05)
        (died,) = await reward.score(samples[:1])
        assert isinstance(died, RewardError)
        assert await reward.score(samples[:1]) == [1.0]
        last = pid(reward)
    finally:
        await reward.close()
    assert not alive(last)


async def _apart(sample: Sample) -> Any:
    reward = MathReward(MathConfig(boxed=True))
    try:
        return await reward.score([sample])
    finally:
        await reward.close()


async def test_worker_past_its_deadline_is_killed(make_sample: Make):
    reward = MathReward(MathConfig(timeout=0.05))  # less than a worker takes to start
    try:
        (late,) = await reward.score([make_sample(r"\boxed{1}", "1")])
        assert isinstance(late, RewardError)
        assert "did not answer within 0.05 s" in str(late)
        assert reward._workers[0]._process is None
    finally:
        await reward.close()


async def test_cancelled_scoring_leaves_no_worker(make_sample: Make):
    reward = MathReward(MathConfig())
    scoring = asyncio.ensure_future(reward.score([make_sample(r"\boxed{1}", "1")]))
    while not reward._workers or reward._workers[0]._process is None:
        await asyncio.sleep(0.01)
    worker = pid(reward)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    await reward.close()
    assert not alive(worker)
