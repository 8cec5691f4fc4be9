"""From a validated config to component instances, in the controller process."""

from __future__ import annotations

import dataclasses
from typing import Any

from miles_core.config.run import RunConfig
from miles_core.contracts.backends import TrainBackend
from miles_core.contracts.engines import Engine, Sampling
from miles_core.contracts.environments import AgentEnvironment, GenerateEnvironment
from miles_core.contracts.families import ModelFamily, Tokenizer
from miles_core.contracts.filters import GroupFilter
from miles_core.contracts.launchers import Launcher
from miles_core.contracts.matchers import MessageMatcher
from miles_core.contracts.rewards import Reward
from miles_core.contracts.sources import DataSource
from miles_core.contracts.trackers import Tracker
from miles_core.contracts.transports import WeightTransport
from miles_core.plugins import PluginManager

__all__ = ["Components", "build_components", "greedy", "sampling_of", "stop_ids", "trainer_processes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Components:
    """Everything in the controller that the config chose by name."""

    family: ModelFamily[Any]
    source: DataSource[Any]
    environment: GenerateEnvironment[Any]
    reward: Reward[Any]
    filters: tuple[tuple[str, GroupFilter[Any]], ...]
    engine: Engine[Any]
    teacher: Engine[Any] | None
    evaluation_engine: Engine[Any] | None
    transport: WeightTransport[Any]
    launcher: Launcher[Any]
    trackers: tuple[Tracker[Any], ...]
    evaluation_sources: tuple[DataSource[Any], ...]


def build_components(config: RunConfig, plugins: PluginManager) -> Components:
    """Raises what a component's constructor or its section's validation raises, attributed to its plugin."""
    create = plugins.create
    family = create("miles_model_families", config.model.family.use, config.model.family.settings, ModelFamily)
    return Components(
        family=family,
        source=create("miles_data_sources", config.data.use, config.data.settings, DataSource),
        environment=_environment(config, plugins),
        reward=create("miles_rewards", config.reward.use, config.reward.settings, Reward),
        filters=tuple(
            (name, create("miles_group_filters", name, config.filters.settings(name), GroupFilter))
            for name in config.filters.use
        ),
        engine=create("miles_engines", config.engine.use, config.engine.settings, Engine),
        teacher=(
            create("miles_engines", config.teacher.engine.use, config.teacher.engine.settings, Engine)
            if config.teacher is not None
            else None
        ),
        evaluation_engine=(
            create("miles_engines", config.evaluation.engine.use, config.evaluation.engine.settings, Engine)
            if config.evaluation.placement == "dedicated"
            else None
        ),
        transport=create(
            "miles_weight_transports",
            config.transport.use,
            config.transport.settings,
            WeightTransport,
        ),
        launcher=create("miles_launchers", config.launcher.use, config.launcher.settings, Launcher),
        trackers=tuple(
            create("miles_trackers", name, config.trackers.settings(name), Tracker) for name in config.trackers.use
        ),
        evaluation_sources=tuple(
            create("miles_data_sources", d.use, d.settings, DataSource) for d in config.evaluation.datasets
        ),
    )


def _environment(config: RunConfig, plugins: PluginManager) -> GenerateEnvironment[Any]:
    """The chosen environment; one of the agent layer behind a session server of this process."""
    chosen, sessions = config.environment, config.sessions
    if chosen.use not in plugins.names("miles_agent_environments"):
        return plugins.create("miles_generate_environments", chosen.use, chosen.settings, GenerateEnvironment)
    from miles_core.tito.agent_runner import AgentRunner

    matcher = sessions.matcher
    return AgentRunner(
        plugins.create("miles_agent_environments", chosen.use, chosen.settings, AgentEnvironment),
        plugins.create("miles_message_matchers", matcher.use, matcher.settings, MessageMatcher),
        mode=sessions.mode,
        leaves=sessions.leaves,
        max_nodes=sessions.max_nodes,
    )


def trainer_processes(config: RunConfig, plugins: PluginManager) -> int:
    """How many processes the configured backend runs in."""
    return plugins.create("miles_train_backends", config.backend.use, config.backend.settings, TrainBackend).processes


def stop_ids(parts: Components, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The family's stop tokens, as ids."""
    return tuple(tokenizer.special(token) for token in parts.family.stop_tokens())


def sampling_of(config: RunConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
    """The run's sampling; `stop_token_ids` are the family's own, added to the config's."""
    section = config.sampling
    return Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        stop=section.stop,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *section.stop_token_ids))),
    )


def greedy(sampling: Sampling) -> Sampling:
    """The same limits and stops, without randomness."""
    return dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
