"""Environments: three nested layers, and an environment plugin takes exactly one.

What an outer layer takes over, the inner ones leave to it (see the architecture page): an agent environment
talks to a chat endpoint, a generate environment owns the token loop of one episode, a rollout environment owns a
whole batch of episodes.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.component import Component, ConfigT
from miles_core.data.group import Episode, Group, Prompt

if TYPE_CHECKING:
    from miles_core.contracts.engines import EngineClient, Sampling
    from miles_core.contracts.families import ModelFamily, Tokenizer

__all__ = [
    "AgentEnvironment",
    "Endpoint",
    "EpisodeTask",
    "GenerateEnvironment",
    "Outcome",
    "RolloutEnvironment",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTask:
    """One episode to run. `seed` belongs to (run seed, prompt, episode); turn `i` of it samples with `turn_seed(i)`.

    `priority` is the episode's place in submission order (lower first).
    """

    prompt: Prompt
    group_id: str
    episode_id: str
    sampling: Sampling
    seed: int
    priority: int = 0
    max_tokens: int = 0
    """Total token limit of a trajectory, 0 for none."""

    def turn_seed(self, turn: int) -> int:
        """Seed of turn `turn`: a 31-bit hash of (seed, turn)."""
        from miles_core.data.seeds import derive_seed

        return derive_seed(self.seed, "turn", turn)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where an agent sends its chat requests: a session's base URL (`…/sessions/ID`) and its bearer token."""

    base_url: str
    token: str
    model: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an agent's run came to. `reward` None means that the core's reward scores the episode."""

    reward: float | Mapping[str, float] | None = None
    stop_reason: str = "completed"
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    artifacts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class AgentEnvironment(Component[ConfigT], abc.ABC):
    """Innermost layer: runs an agent against a chat endpoint. The core records, scores, groups and trains."""

    @abc.abstractmethod
    async def run(self, endpoint: Endpoint, prompt: Prompt, sampling: Sampling, metadata: Mapping[str, Any]) -> Outcome:
        """One episode. Raises `EnvironmentFailure` when infrastructure failed. On cancellation everything that was
        started (sandboxes, processes, ports, temporary directories) is gone when the call ends."""


class GenerateEnvironment(Component[ConfigT], abc.ABC):
    """Middle layer: owns the loop of one episode, token ids in and out."""

    def bind(self, family: ModelFamily[Any], tokenizer: Tokenizer) -> None:
        """Called once before the first episode with the run's model family (renderer, parser) and its tokenizer."""
        self.family = family
        self.tokenizer = tokenizer

    async def setup(self) -> None:
        """Called once, after `bind` and before the first episode, in the run's event loop. Default: nothing."""

    async def close(self) -> None:
        """Release what `setup` took, also after a failure. Idempotent. Default: nothing."""

    @abc.abstractmethod
    async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
        """One episode, its trajectories recorded from the engine's own ids, log-probs and versions.

        Raises `EnvironmentFailure` when infrastructure failed; a cancelled episode leaves nothing behind."""


class RolloutEnvironment(Component[ConfigT], abc.ABC):
    """Outermost layer: owns a whole batch of episodes, with rewards and grouping."""

    @abc.abstractmethod
    def rollout(self, prompts: Sequence[Prompt], run_episode: Callable[[EpisodeTask], Any]) -> AsyncIterator[Group]:
        """Yields each group once, as it finishes. `run_episode` is the core's own way to run one episode."""
