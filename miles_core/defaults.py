"""The core's own plugin: the embedded defaults, registered through the same hooks as everybody's.

Component classes are importable without torch; those that run in the trainer load it when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.plugins import hookimpl

if TYPE_CHECKING:
    from miles_core.contracts.backends import TrainBackend
    from miles_core.contracts.engines import Engine
    from miles_core.contracts.environments import GenerateEnvironment
    from miles_core.contracts.families import ModelFamily
    from miles_core.contracts.filters import GroupFilter
    from miles_core.contracts.launchers import Launcher
    from miles_core.contracts.objective import AdvantageEstimator, LossTerm
    from miles_core.contracts.rewards import Reward
    from miles_core.contracts.sources import DataSource
    from miles_core.contracts.trackers import Tracker
    from miles_core.contracts.transports import WeightTransport


@hookimpl
def miles_model_families() -> dict[str, type[ModelFamily[Any]]]:
    """`chatml`."""
    from miles_core.tito.families.chatml import ChatMLFamily

    return {"chatml": ChatMLFamily}


@hookimpl
def miles_generate_environments() -> dict[str, type[GenerateEnvironment[Any]]]:
    """`single_turn`."""
    from miles_core.rollout.environments.single_turn import SingleTurn

    return {"single_turn": SingleTurn}


@hookimpl
def miles_data_sources() -> dict[str, type[DataSource[Any]]]:
    """`jsonl`, `parquet`, `datasets` and `reasoning_gym`."""
    from miles_core.rollout.sources.arrow import DatasetsSource, ParquetSource
    from miles_core.rollout.sources.jsonl import JsonlSource
    from miles_core.rollout.sources.reasoning_gym import ReasoningGymSource

    return {
        "datasets": DatasetsSource,
        "jsonl": JsonlSource,
        "parquet": ParquetSource,
        "reasoning_gym": ReasoningGymSource,
    }


@hookimpl
def miles_rewards() -> dict[str, type[Reward[Any]]]:
    """Scores by text comparison, by the task's own scorer."""
    from miles_core.rollout.rewards.procedural import ReasoningGymReward
    from miles_core.rollout.rewards.text import Choice, Exact, TokenF1

    return {"choice": Choice, "exact": Exact, "f1": TokenF1, "reasoning_gym": ReasoningGymReward}


@hookimpl
def miles_group_filters() -> dict[str, type[GroupFilter[Any]]]:
    """`nonzero_std` and `no_aborted`."""
    from miles_core.rollout.filters import NoAborted, NonzeroStd

    return {"no_aborted": NoAborted, "nonzero_std": NonzeroStd}


@hookimpl
def miles_advantage_estimators() -> dict[str, type[AdvantageEstimator[Any]]]:
    """Rewards to advantages."""
    from miles_core.objective.grpo import Grpo

    return {"grpo": Grpo}


@hookimpl
def miles_loss_terms() -> dict[str, type[LossTerm[Any]]]:
    """Additive loss terms."""
    from miles_core.objective.entropy import Entropy
    from miles_core.objective.kl import Kl
    from miles_core.objective.policy import Policy
    from miles_core.objective.supervised import Supervised

    return {"entropy": Entropy, "kl": Kl, "policy": Policy, "supervised": Supervised}


@hookimpl
def miles_engines() -> dict[str, type[Engine[Any]]]:
    """`embedded`."""
    from miles_core.engines.embedded_launch import EmbeddedEngine

    return {"embedded": EmbeddedEngine}


@hookimpl
def miles_train_backends() -> dict[str, type[TrainBackend[Any]]]:
    """`fsdp`."""
    from miles_core.training.fsdp import FsdpBackend

    return {"fsdp": FsdpBackend}


@hookimpl
def miles_weight_transports() -> dict[str, type[WeightTransport[Any]]]:
    """`shared_memory`."""
    from miles_core.sync.shared_memory import SharedMemoryTransport

    return {"shared_memory": SharedMemoryTransport}


@hookimpl
def miles_launchers() -> dict[str, type[Launcher[Any]]]:
    """`local`."""
    from miles_core.runs.launcher import LocalLauncher

    return {"local": LocalLauncher}


@hookimpl
def miles_trackers() -> dict[str, type[Tracker[Any]]]:
    """`sqlite` and `console`."""
    from miles_core.cli.panel import ConsoleTracker
    from miles_core.runs.metrics import SqliteTracker

    return {"console": ConsoleTracker, "sqlite": SqliteTracker}
