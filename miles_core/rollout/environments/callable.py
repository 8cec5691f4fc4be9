"""An agent that is a Python function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import AgentEnvironment, Endpoint, Outcome
from miles_core.data.group import Prompt
from miles_core.errors import ConfigError, EnvironmentFailure, Problem
from miles_core.rollout.functions import load_function

__all__ = ["CallableAgent", "CallableAgentConfig"]


class CallableAgentConfig(ComponentConfig):
    """Section `[environment]` of `callable`."""

    function: str = Field(pattern=r".+:[A-Za-z_]\w*$")
    """`module:function` or `path/to/file.py:function`: an async function `run(endpoint, prompt, sampling, metadata)`
    that returns an `Outcome`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of every call."""


class CallableAgent(AgentEnvironment[CallableAgentConfig]):
    """Awaits the function; cancelling the episode cancels it."""

    Config = CallableAgentConfig

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """An agent that asks once."""
        path = bench.directory / "agent.py"
        path.write_text(_EXAMPLE, encoding="utf-8")
        return Example(settings={"function": f"{path}:run"})

    def __init__(self, config: CallableAgentConfig) -> None:
        super().__init__(config)
        self._function = load_function(config.function, key="environment.function")
        if not inspect.iscoroutinefunction(self._function):
            problem = Problem(
                key="environment.function",
                value=config.function,
                message="is not an async function",
                hint="write it as `async def`: an agent that cannot be cancelled leaves its episode behind",
            )
            raise ConfigError([problem])

    async def run(self, endpoint: Endpoint, prompt: Prompt, sampling: Sampling, metadata: Mapping[str, Any]) -> Outcome:
        """See `AgentEnvironment.run`. Raises `EnvironmentFailure` when the function returns anything else."""
        outcome = await self._function(endpoint, prompt, sampling, metadata, **self.config.arguments)
        if not isinstance(outcome, Outcome):
            raise EnvironmentFailure(f"{self.config.function} returned {outcome!r:.200}, expected a miles_core Outcome")
        return outcome


_EXAMPLE = """
import aiohttp

from miles_core.contracts.environments import Outcome
from miles_core.errors import EnvironmentFailure


async def run(endpoint, prompt, sampling, metadata):
    body = {"model": endpoint.model, "messages": list(prompt.messages), "max_tokens": sampling.max_new_tokens}
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    try:
        async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as session:
            async with session.post(f"{endpoint.base_url}/v1/chat/completions", json=body) as response:
                await response.json()
    except aiohttp.ClientError as error:
        raise EnvironmentFailure(f"the session did not answer: {error}") from error
    return Outcome(metrics={"turns": 1.0})
"""
