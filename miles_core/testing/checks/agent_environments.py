"""Laws of agent environments: an outcome from a chat endpoint, failures that say so, a cancellation that is one.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import Endpoint, Outcome
from miles_core.data.group import Prompt
from miles_core.errors import EnvironmentFailure
from miles_core.testing.kit import Case, Check
from miles_core.testing.leftovers import children, leftover_tasks
from miles_core.testing.serving import ChatService, dead_url, served

__all__ = ["CHECKS"]

TOKEN = "token-of-this-session-9f86d081884c7d65"


async def an_episode_has_an_outcome(case: Case) -> None:
    with _endpoint(ChatService()) as (service, endpoint):
        outcome = await _run(case, endpoint)
        assert isinstance(outcome, Outcome), f"run() returned {outcome!r}, expected an Outcome"
        assert service.requests, "the agent asked nothing of its endpoint"
        rewards = outcome.reward
        numbers = list(rewards.values()) if isinstance(rewards, Mapping) else [] if rewards is None else [rewards]
        assert all(math.isfinite(number) for number in numbers), f"the reward {rewards} is not finite"
        assert all(math.isfinite(number) for number in outcome.metrics.values()), "a metric is not finite"
        assert outcome.stop_reason, "the outcome has no stop reason"


async def every_request_carries_the_token(case: Case) -> None:
    with _endpoint(ChatService()) as (service, endpoint):
        await _run(case, endpoint)
        wrong = [header for header, _ in service.requests if header != f"Bearer {TOKEN}"]
        assert not wrong, f"{len(wrong)} requests do not carry the session's bearer token"
        assert all(body.get("messages") for _, body in service.requests), "a request has no messages"


async def it_runs_again(case: Case) -> None:
    with _endpoint(ChatService()) as (service, endpoint):
        agent = case.create()
        before = children()
        for number in (1, 2):
            asked = len(service.requests)
            await agent.run(endpoint, _PROMPT, _SAMPLING, {})
            assert len(service.requests) > asked, f"episode {number} of one instance asks nothing"
        assert children() <= before, "a process of an episode runs on after it"


async def a_dead_endpoint_is_an_environment_failure(case: Case) -> None:
    endpoint = Endpoint(base_url=f"{dead_url()}/sessions/s1", token=TOKEN, model="policy")
    try:
        outcome = await _run(case, endpoint)
    except EnvironmentFailure:
        return
    except Exception as error:
        raise AssertionError(
            f"an endpoint that refuses connections raises {type(error).__name__}: {error}; expected EnvironmentFailure"
        ) from error
    raise AssertionError(f"an endpoint that refuses connections gave the outcome {outcome}")


async def cancellation_leaves_nothing(case: Case) -> None:
    with _endpoint(ChatService(hang=True)) as (service, endpoint):
        tasks, processes = asyncio.all_tasks(), children()
        episode = asyncio.create_task(_run(case, endpoint))
        while not service.arrived.is_set() and not episode.done():
            await asyncio.sleep(0.01)
        assert not episode.done(), "the episode ended though its endpoint never answered"
        episode.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await episode
        assert episode.cancelled(), "run() swallows its cancellation"
        left = leftover_tasks(tasks)
        assert not left, f"tasks of a cancelled episode run on: {left}"
        assert children() <= processes, "processes of a cancelled episode run on"


CHECKS: tuple[Check, ...] = (
    an_episode_has_an_outcome,
    every_request_carries_the_token,
    it_runs_again,
    a_dead_endpoint_is_an_environment_failure,
    cancellation_leaves_nothing,
)

_PROMPT = Prompt(prompt_id="p:1", messages=({"role": "user", "content": "2 + 2?"},), label="4")
_SAMPLING = Sampling(max_new_tokens=16)


@contextlib.contextmanager
def _endpoint(service: ChatService) -> Iterator[tuple[ChatService, Endpoint]]:
    with served(service.application) as url:
        yield service, Endpoint(base_url=f"{url}/sessions/s1", token=TOKEN, model="policy")


async def _run(case: Case, endpoint: Endpoint) -> Any:
    return await case.create().run(endpoint, _PROMPT, _SAMPLING, {})
