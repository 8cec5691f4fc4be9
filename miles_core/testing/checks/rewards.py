"""Laws of rewards: a finite score a sample, in order, and an error where there is none.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from miles_core.contracts.rewards import Reward, Sample
from miles_core.data.group import Episode, Prompt
from miles_core.data.trajectory import Status
from miles_core.errors import RewardError
from miles_core.testing.kit import Case, Check

__all__ = ["CHECKS", "sample"]


async def scores_are_finite_one_a_sample(case: Case) -> None:
    samples = _samples(case)
    async with _ready(case) as reward:
        scores = await reward.score(samples)
        assert len(scores) == len(samples), f"{len(samples)} samples got {len(scores)} scores"
        for one, score in zip(samples, scores, strict=True):
            if isinstance(score, RewardError):
                raise AssertionError(f"the example's response {one.response!r} cannot be scored: {score}")
            numbers = list(score.values()) if isinstance(score, Mapping) else [score]
            assert numbers, f"the response {one.response!r} got an empty mapping"
            for number in numbers:
                assert isinstance(number, int | float), f"the response {one.response!r} scores {score!r}, no number"
                assert math.isfinite(number), f"the response {one.response!r} scores {score!r}, which is not finite"
        assert any(_size(score) for score in scores), "every response of the example scores 0: nothing is shown"


async def scores_follow_their_samples(case: Case) -> None:
    samples = _samples(case)
    order = [*range(1, len(samples)), 0]
    async with _ready(case) as reward:
        scores = await reward.score(samples)
        turned = await reward.score([samples[i] for i in order])
        assert [str(scores[i]) for i in order] == [str(score) for score in turned], (
            f"samples in another order get other scores: {scores} became {turned} in the order {order}"
        )


async def no_samples_have_no_scores(case: Case) -> None:
    async with _ready(case) as reward:
        scores = await reward.score([])
        assert len(scores) == 0, f"no samples got {len(scores)} scores"


async def what_cannot_be_scored_is_an_error(case: Case) -> None:
    """A row that lost its label and metadata scores as it did (a reward that needs neither), or is an error."""
    samples = _samples(case)
    async with _ready(case) as reward:
        scores = await reward.score(samples)
        for before, one in zip(scores, samples, strict=True):
            bare = dataclasses.replace(one, prompt=dataclasses.replace(one.prompt, label=None, metadata={}))
            try:
                (after,) = await reward.score([bare])
            except RewardError:
                continue
            assert isinstance(after, RewardError) or not _size(before) or _size(after), (
                f"without label and metadata the response {one.response!r} scores 0 instead of {before}: what cannot "
                "be scored is a RewardError, so that its episode fails and does not train"
            )


async def it_scores_again_after_setup(case: Case) -> None:
    samples = _samples(case)
    reward: Reward[Any] = case.create()
    try:
        for _ in range(2):
            await reward.setup()
            for _ in range(2):
                scores = await reward.score(samples)
                assert len(scores) == len(samples), f"asked again, {len(samples)} samples got {len(scores)} scores"
            await reward.close()
    finally:
        await reward.close()


async def close_is_idempotent(case: Case) -> None:
    reward: Reward[Any] = case.create()
    await reward.close()
    await reward.setup()
    await reward.score(_samples(case)[:1])
    for _ in range(2):
        try:
            await reward.close()
        except Exception as error:
            raise AssertionError(f"close() raises when it is called again: {type(error).__name__}: {error}") from error


CHECKS: tuple[Check, ...] = (
    scores_are_finite_one_a_sample,
    scores_follow_their_samples,
    no_samples_have_no_scores,
    what_cannot_be_scored_is_an_error,
    it_scores_again_after_setup,
    close_is_idempotent,
)

DEFAULT: Sequence[tuple[Prompt, str]] = tuple(
    (Prompt(prompt_id="sum:1", messages=({"role": "user", "content": "2 + 2 ="},), label="4"), response)
    for response in ("4", "5", "the answer is 4", "")
)


def sample(prompt: Prompt, response: str, number: int = 0) -> Sample:
    """A completed episode's sample, without trajectories."""
    messages = (*prompt.messages, {"role": "assistant", "content": response})
    episode = Episode(
        episode_id=f"g.{number}",
        prompt_id=prompt.prompt_id,
        group_id="g",
        status=Status.COMPLETED,
        trajectories=(),
        messages=messages,
    )
    return Sample(prompt=prompt, response=response, messages=messages, episode=episode)


def _samples(case: Case) -> list[Sample]:
    pairs = case.example.inputs or DEFAULT
    return [sample(prompt, response, number) for number, (prompt, response) in enumerate(pairs)]


@contextlib.asynccontextmanager
async def _ready(case: Case) -> AsyncIterator[Reward[Any]]:
    """A reward that is set up inside the block and closed after it."""
    reward: Reward[Any] = case.create()
    try:
        await reward.setup()
        yield reward
    finally:
        await reward.close()


def _size(score: Any) -> float:
    """0 for a score of 0, or a mapping of zeros."""
    if isinstance(score, RewardError):
        return 0.0
    return sum(abs(v) for v in score.values()) if isinstance(score, Mapping) else abs(float(score))
