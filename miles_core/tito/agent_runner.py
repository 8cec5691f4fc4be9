"""An agent environment as a generate environment: every episode gets a session and an endpoint, and is exported."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.environments import AgentEnvironment, Endpoint, EpisodeTask, GenerateEnvironment, Outcome
from miles_core.contracts.matchers import MessageMatcher
from miles_core.data.group import Episode
from miles_core.data.trajectory import Status
from miles_core.errors import EnvironmentFailure
from miles_core.tito.export import PICKERS, Identity, export
from miles_core.tito.server import SessionApp
from miles_core.tito.serving import SessionServer
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.store import SessionStore
from miles_core.tito.tree import Mode

if TYPE_CHECKING:
    from miles_core.contracts.engines import EngineClient

__all__ = ["AgentRunner"]

MODEL = "policy"


class AgentRunner(GenerateEnvironment[ComponentConfig]):
    """Runs `agent` against the session server of this process.

    Sampling is the run's: what an agent asks of temperature, top_p, top_k, min_p and seed is ignored, since log-probs
    at another temperature could not be trained on; its `max_tokens` and stop strings count. Turn `i` of an episode is
    seeded by `EpisodeTask.turn_seed(i)`.
    """

    def __init__(
        self,
        agent: AgentEnvironment[Any],
        matcher: MessageMatcher[Any],
        *,
        mode: Mode = "branching",
        leaves: str = "drop_retries",
        max_nodes: int = 4096,
    ) -> None:
        super().__init__(ComponentConfig())
        self.agent = agent
        self._matcher = matcher
        self._mode = mode
        self._picker = PICKERS[leaves]
        self._max_nodes = max_nodes
        self._server: SessionServer | None = None

    async def setup(self) -> None:
        """Start the session server on a free loopback port."""
        codec = Codec(family=self.family, tokenizer=self.tokenizer, matcher=self._matcher)
        self._server = SessionServer(SessionApp(SessionStore(codec), model=MODEL))
        await self._server.start()

    async def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
        """See `GenerateEnvironment.generate`. Raises `EnvironmentFailure` when the agent never asked anything."""
        assert self._server is not None, "setup() comes first"
        store = self._server.app.store
        session = store.open(
            SessionSettings(
                engine=engine,
                sampling=task.sampling,
                locked=True,
                turn_seed=task.turn_seed,
                max_tokens=task.max_tokens,
                mode=self._mode,
                max_nodes=self._max_nodes,
                routing_key=task.episode_id,
                priority=task.priority,
                ttl=float("inf"),  # the episode's own timeout ends it
            )
        )
        endpoint = Endpoint(base_url=f"{self._server.url}/sessions/{session.id}", token=session.token, model=MODEL)
        try:
            outcome = await self.agent.run(endpoint, task.prompt, task.sampling, task.prompt.metadata)
            return await asyncio.to_thread(self._episode, task, session, outcome)
        finally:
            store.end(session.id)

    def _episode(self, task: EpisodeTask, session: Session, outcome: Outcome) -> Episode:
        identity = Identity(prompt_id=task.prompt.prompt_id, group_id=task.group_id, episode_id=task.episode_id)
        trajectories = export(session.tree, identity, max_tokens=task.max_tokens, picker=self._picker)
        if not trajectories:
            raise EnvironmentFailure(f"episode {task.episode_id}: the agent ended without one answered request")
        last = session.tree.leaves()[-1]
        cut = (
            session.full
            or outcome.stop_reason == "truncated"
            or any(t.status is Status.TRUNCATED for t in trajectories)
        )
        status = Status.TRUNCATED if cut else Status.COMPLETED
        episode = Episode(
            episode_id=task.episode_id,
            prompt_id=task.prompt.prompt_id,
            group_id=task.group_id,
            status=status,
            trajectories=tuple(dataclasses.replace(t, status=status) for t in trajectories),
            metrics={**_metrics(session), **outcome.metrics},
            messages=tuple(session.messages(last)),
        )
        return episode if outcome.reward is None else episode.with_reward(outcome.reward)


def _metrics(session: Session) -> dict[str, float]:
    """Numbers of an episode for the report, named as the other environments name them; seconds are wall time."""
    nodes = [node.added for node in session.tree.walk() if node.added is not None]
    parts = [part for added in nodes for part in added.parts]
    return {
        "turns": float(len(nodes)),
        "leaves": float(len(session.tree.leaves())),
        "prompt_tokens": float(session.prompt_tokens),
        "cached_tokens": float(session.cached_tokens),
        "response_tokens": float(sum(part.count for part in parts)),
        "generate_seconds": sum(part.finished - part.started for part in parts),
    }
