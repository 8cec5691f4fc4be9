"""Faults of agent environments."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import subprocess

from miles_core.contracts.environments import Outcome
from miles_core.errors import EnvironmentFailure
from miles_core.rollout.environments.callable import CallableAgent
from planted_faults import scaffolded

Good = scaffolded("agent_environments")
GOOD = (Good, CallableAgent)


class Number(Good):
    """Gives a reward where an outcome is due."""

    async def run(self, endpoint, prompt, sampling, metadata):
        await super().run(endpoint, prompt, sampling, metadata)
        return 1.0


class Lazy(Good):
    """Knows the answer."""

    async def run(self, endpoint, prompt, sampling, metadata):
        return Outcome(reward=1.0)


class NotANumber(Good):
    """Its reward is none."""

    async def run(self, endpoint, prompt, sampling, metadata):
        outcome = await super().run(endpoint, prompt, sampling, metadata)
        return dataclasses.replace(outcome, reward=math.nan)


class WithoutToken(Good):
    """Forgets who it is."""

    async def run(self, endpoint, prompt, sampling, metadata):
        return await super().run(dataclasses.replace(endpoint, token="none"), prompt, sampling, metadata)


class Once(Good):
    """Has one episode in it."""

    used = False

    async def run(self, endpoint, prompt, sampling, metadata):
        if not self.used:
            self.used = True
            return await super().run(endpoint, prompt, sampling, metadata)
        return Outcome()


class LeavesProcess(Good):
    """Leaves a helper running."""

    async def run(self, endpoint, prompt, sampling, metadata):
        subprocess.Popen(["sleep", "3"])
        return await super().run(endpoint, prompt, sampling, metadata)


class ZeroForDead(Good):
    """A dead endpoint earns 0."""

    async def run(self, endpoint, prompt, sampling, metadata):
        try:
            return await super().run(endpoint, prompt, sampling, metadata)
        except EnvironmentFailure:
            return Outcome(reward=0.0)


class OtherError(Good):
    """Raises what it got."""

    async def run(self, endpoint, prompt, sampling, metadata):
        try:
            return await super().run(endpoint, prompt, sampling, metadata)
        except EnvironmentFailure as error:
            raise ConnectionError("refused") from error


class Detached(Good):
    """Runs on when nobody waits."""

    async def run(self, endpoint, prompt, sampling, metadata):
        self.running = asyncio.create_task(super().run(endpoint, prompt, sampling, metadata))
        return await asyncio.shield(self.running)


class SwallowsCancellation(Good):
    """Ends as if it had finished."""

    async def run(self, endpoint, prompt, sampling, metadata):
        try:
            return await super().run(endpoint, prompt, sampling, metadata)
        except asyncio.CancelledError:
            return Outcome(stop_reason="cancelled")


FAULTS = {
    "an_episode_has_an_outcome": (Number, Lazy, NotANumber),
    "every_request_carries_the_token": (WithoutToken,),
    "it_runs_again": (Once, LeavesProcess),
    "a_dead_endpoint_is_an_environment_failure": (ZeroForDead, OtherError),
    "cancellation_leaves_nothing": (Detached, SwallowsCancellation, LeavesProcess),
}
