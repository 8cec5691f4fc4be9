"""The core's own plugin: the embedded defaults, registered through the same hooks as everybody's.

Component classes are importable without torch; those that run in the trainer load it when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.plugins import hookimpl

if TYPE_CHECKING:
    from miles_core.contracts.backends import TrainBackend
    from miles_core.contracts.engines import Engine
    from miles_core.contracts.environments import AgentEnvironment, GenerateEnvironment
    from miles_core.contracts.families import ModelFamily
    from miles_core.contracts.filters import GroupFilter
    from miles_core.contracts.launchers import Launcher
    from miles_core.contracts.matchers import MessageMatcher
    from miles_core.contracts.objective import AdvantageEstimator, Correction, LossTerm
    from miles_core.contracts.rewards import Reward
    from miles_core.contracts.sandboxes import Sandbox
    from miles_core.contracts.sources import DataSource
    from miles_core.contracts.trackers import Tracker
    from miles_core.contracts.transports import WeightTransport


@hookimpl
def miles_model_families() -> dict[str, type[ModelFamily[Any]]]:
    """`chatml` (SmolLM2, Qwen2.5), `qwen3`, `qwen3_5`, `qwen3_coder`, and `template` for any tokenizer with a chat
    template."""
    from miles_core.tito.families.chatml import ChatMLFamily
    from miles_core.tito.families.qwen3 import Qwen3Family
    from miles_core.tito.families.qwen3_5 import Qwen35Family
    from miles_core.tito.families.qwen3_coder import Qwen3CoderFamily
    from miles_core.tito.families.template import TemplateFamily

    return {
        "chatml": ChatMLFamily,
        "qwen3": Qwen3Family,
        "qwen3_5": Qwen35Family,
        "qwen3_coder": Qwen3CoderFamily,
        "template": TemplateFamily,
    }


@hookimpl
def miles_message_matchers() -> dict[str, type[MessageMatcher[Any]]]:
    """`strict`, `tool_arguments` and `role_content`, strictest first."""
    from miles_core.tito.matchers import RoleContentMatcher, StrictMatcher, ToolArgumentsMatcher

    return {"role_content": RoleContentMatcher, "strict": StrictMatcher, "tool_arguments": ToolArgumentsMatcher}


@hookimpl
def miles_agent_environments() -> dict[str, type[AgentEnvironment[Any]]]:
    """`callable`."""
    from miles_core.rollout.environments.callable import CallableAgent

    return {"callable": CallableAgent}


@hookimpl
def miles_generate_environments() -> dict[str, type[GenerateEnvironment[Any]]]:
    """`single_turn`, `tools`, and `supervised`, whose episodes are the data's."""
    from miles_core.rollout.environments.single_turn import SingleTurn
    from miles_core.rollout.environments.supervised import Supervised
    from miles_core.rollout.environments.tools import ToolLoop

    return {"single_turn": SingleTurn, "supervised": Supervised, "tools": ToolLoop}


@hookimpl
def miles_sandboxes() -> dict[str, type[Sandbox[Any]]]:
    """`subprocess`."""
    from miles_core.rollout.sandboxes.subprocess import SubprocessSandbox

    return {"subprocess": SubprocessSandbox}


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
    """Scores by comparison, by the task's own scorer, by a function or service, or by what a row names."""
    from miles_core.rollout.rewards.by_metadata import ByMetadata
    from miles_core.rollout.rewards.function import CallableReward
    from miles_core.rollout.rewards.math import MathReward
    from miles_core.rollout.rewards.none import NoReward
    from miles_core.rollout.rewards.procedural import ReasoningGymReward
    from miles_core.rollout.rewards.remote import RemoteReward
    from miles_core.rollout.rewards.text import Choice, Exact, TokenF1

    return {
        "by_metadata": ByMetadata,
        "callable": CallableReward,
        "choice": Choice,
        "exact": Exact,
        "f1": TokenF1,
        "math": MathReward,
        "none": NoReward,
        "reasoning_gym": ReasoningGymReward,
        "remote": RemoteReward,
    }


@hookimpl
def miles_group_filters() -> dict[str, type[GroupFilter[Any]]]:
    """`nonzero_std` and `no_aborted`."""
    from miles_core.rollout.filters import NoAborted, NonzeroStd

    return {"no_aborted": NoAborted, "nonzero_std": NonzeroStd}


@hookimpl
def miles_advantage_estimators() -> dict[str, type[AdvantageEstimator[Any]]]:
    """Rewards to advantages."""
    from miles_core.objective.grpo import Grpo
    from miles_core.objective.gspo import Gspo
    from miles_core.objective.none import NoAdvantages
    from miles_core.objective.ppo import Ppo
    from miles_core.objective.reinforce_pp import ReinforcePlusPlus, ReinforcePlusPlusBaseline

    return {
        "grpo": Grpo,
        "gspo": Gspo,
        "none": NoAdvantages,
        "ppo": Ppo,
        "reinforce_pp": ReinforcePlusPlus,
        "reinforce_pp_baseline": ReinforcePlusPlusBaseline,
    }


@hookimpl
def miles_loss_terms() -> dict[str, type[LossTerm[Any]]]:
    """Additive loss terms."""
    from miles_core.objective.distillation import Distillation
    from miles_core.objective.distillation_top_k import DistillationTopK
    from miles_core.objective.entropy import Entropy
    from miles_core.objective.kl import Kl
    from miles_core.objective.policy import Policy
    from miles_core.objective.supervised import Supervised
    from miles_core.objective.value import Value

    return {
        "distillation": Distillation,
        "distillation_top_k": DistillationTopK,
        "entropy": Entropy,
        "kl": Kl,
        "policy": Policy,
        "supervised": Supervised,
        "value": Value,
    }


@hookimpl
def miles_corrections() -> dict[str, type[Correction[Any]]]:
    """Answers to the mismatch between trainer and rollout."""
    from miles_core.objective.clip_or_pop import ClipOrPop
    from miles_core.objective.mis import Mis
    from miles_core.objective.opsm import Opsm
    from miles_core.objective.tis import Tis

    return {"clip_or_pop": ClipOrPop, "mis": Mis, "opsm": Opsm, "tis": Tis}


@hookimpl
def miles_engines() -> dict[str, type[Engine[Any]]]:
    """`embedded`, `sglang`, and `none` for runs that sample nothing."""
    from miles_core.engines.embedded_launch import EmbeddedEngine
    from miles_core.engines.none import NoEngine
    from miles_core.engines.sglang import SglangEngine

    return {"embedded": EmbeddedEngine, "none": NoEngine, "sglang": SglangEngine}


@hookimpl
def miles_train_backends() -> dict[str, type[TrainBackend[Any]]]:
    """`fsdp`."""
    from miles_core.training.fsdp import FsdpBackend

    return {"fsdp": FsdpBackend}


@hookimpl
def miles_weight_transports() -> dict[str, type[WeightTransport[Any]]]:
    """`auto`, `broadcast` and `shared_memory`."""
    from miles_core.sync.auto import AutoTransport
    from miles_core.sync.broadcast import BroadcastTransport
    from miles_core.sync.shared_memory import SharedMemoryTransport

    return {"auto": AutoTransport, "broadcast": BroadcastTransport, "shared_memory": SharedMemoryTransport}


@hookimpl
def miles_launchers() -> dict[str, type[Launcher[Any]]]:
    """`local`."""
    from miles_core.runs.launcher import LocalLauncher

    return {"local": LocalLauncher}


@hookimpl
def miles_trackers() -> dict[str, type[Tracker[Any]]]:
    """`sqlite` and `console`."""
    from miles_core.runs.console import ConsoleTracker
    from miles_core.runs.metrics import SqliteTracker

    return {"console": ConsoleTracker, "sqlite": SqliteTracker}
