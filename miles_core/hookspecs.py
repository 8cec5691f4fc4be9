"""Every hook that a plugin can implement, on one page.

A *registration hook* returns the components that a plugin offers: a mapping from the name that a config uses to the
component **class** (see `miles_core.contracts`). It is called once a process, when the plugin manager is built, before
any config is read; return an empty mapping, or do not implement the hook, to offer nothing. Order does not matter: two
plugins that offer one name are an error that names both.

An *event hook* observes a run. It is called in the controller process, in its event loop's thread, so it must be
quick; plugins are called in the order of their entry-point names. What it raises stops the run, with a note that
names the plugin. Return values are ignored unless said otherwise. Event hooks are never called per token.

All hooks exist since 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from miles_core.contracts.backends import StepReport, TrainBackend
    from miles_core.contracts.engines import Engine
    from miles_core.contracts.environments import AgentEnvironment, GenerateEnvironment, RolloutEnvironment
    from miles_core.contracts.events import CheckpointSaved, EvaluationPoint, RunInfo, VersionPublished
    from miles_core.contracts.families import ModelFamily
    from miles_core.contracts.filters import GroupFilter
    from miles_core.contracts.launchers import Launcher
    from miles_core.contracts.matchers import MessageMatcher
    from miles_core.contracts.objective import AdvantageEstimator, Correction, LossTerm
    from miles_core.contracts.precision import PrecisionContract
    from miles_core.contracts.rewards import Reward
    from miles_core.contracts.sandboxes import Sandbox
    from miles_core.contracts.sources import DataSource
    from miles_core.contracts.trackers import Tracker
    from miles_core.contracts.transports import WeightTransport
    from miles_core.data.group import Batch, Group

PROJECT = "miles"
hookspec = pluggy.HookspecMarker(PROJECT)


# Registration hooks: one a component kind.


@hookspec
def miles_model_families() -> Mapping[str, type[ModelFamily[Any]]]:  # type: ignore[empty-body]
    """Model families: render messages to token ids and parse replies. Chosen by `[model] family`."""


@hookspec
def miles_message_matchers() -> Mapping[str, type[MessageMatcher[Any]]]:  # type: ignore[empty-body]
    """Message matchers of the session server. Chosen by `[sessions] matcher`."""


@hookspec
def miles_agent_environments() -> Mapping[str, type[AgentEnvironment[Any]]]:  # type: ignore[empty-body]
    """Innermost layer: an agent talks to a chat endpoint. Chosen by `[environment] use`."""


@hookspec
def miles_generate_environments() -> Mapping[str, type[GenerateEnvironment[Any]]]:  # type: ignore[empty-body]
    """Middle layer: owns the token loop of one episode. Chosen by `[environment] use`."""


@hookspec
def miles_rollout_environments() -> Mapping[str, type[RolloutEnvironment[Any]]]:  # type: ignore[empty-body]
    """Outermost layer: owns a whole batch of episodes. Chosen by `[environment] use`."""


@hookspec
def miles_sandboxes() -> Mapping[str, type[Sandbox[Any]]]:  # type: ignore[empty-body]
    """Places where an agent's commands run. Chosen by `[sandbox] use`."""


@hookspec
def miles_data_sources() -> Mapping[str, type[DataSource[Any]]]:  # type: ignore[empty-body]
    """Sources of prompts. Chosen by `[data] use` and `[[evaluation.datasets]] use`."""


@hookspec
def miles_rewards() -> Mapping[str, type[Reward[Any]]]:  # type: ignore[empty-body]
    """Rewards: score the episodes of a group, in the controller. Chosen by `[reward] use`."""


@hookspec
def miles_group_filters() -> Mapping[str, type[GroupFilter[Any]]]:  # type: ignore[empty-body]
    """Filters of finished groups. Listed, in order, under `[filters] use`."""


@hookspec
def miles_advantage_estimators() -> Mapping[str, type[AdvantageEstimator[Any]]]:  # type: ignore[empty-body]
    """Advantage estimators. Chosen by `[objective] algorithm`. Used in the trainer process."""


@hookspec
def miles_loss_terms() -> Mapping[str, type[LossTerm[Any]]]:  # type: ignore[empty-body]
    """Additive loss terms. Listed under `[objective] terms`. Used in the trainer process."""


@hookspec
def miles_corrections() -> Mapping[str, type[Correction[Any]]]:  # type: ignore[empty-body]
    """Train/rollout mismatch corrections. Listed under `[objective] corrections`. Used in the trainer process."""


@hookspec
def miles_engines() -> Mapping[str, type[Engine[Any]]]:  # type: ignore[empty-body]
    """Inference engines: reach or launch the servers that sample. Chosen by `[engine] use`."""


@hookspec
def miles_train_backends() -> Mapping[str, type[TrainBackend[Any]]]:  # type: ignore[empty-body]
    """Train backends. Chosen by `[backend] use`. Instantiated in the trainer process."""


@hookspec
def miles_weight_transports() -> Mapping[str, type[WeightTransport[Any]]]:  # type: ignore[empty-body]
    """Weight transports. Chosen by `[transport] use`. Its two ends live in the trainer and the controller."""


@hookspec
def miles_precision_contracts() -> Mapping[str, type[PrecisionContract[Any]]]:  # type: ignore[empty-body]
    """Precision contracts: one quantizer for all four stages of a weight's life. Chosen by `[precision] use`."""


@hookspec
def miles_launchers() -> Mapping[str, type[Launcher[Any]]]:  # type: ignore[empty-body]
    """Launchers: start the run's processes, here or on other hosts. Chosen by `[launcher] use`."""


@hookspec
def miles_trackers() -> Mapping[str, type[Tracker[Any]]]:  # type: ignore[empty-body]
    """Trackers: receive metrics in the controller, a few times a step. Listed under `[trackers] use`."""


# Event hooks: the life of a run, in order.


@hookspec
def miles_run_started(run: RunInfo) -> None:
    """The run directory exists and all processes are up; nothing has been issued yet. Also called on resume."""


@hookspec
def miles_group_finished(run: RunInfo, group: Group) -> None:
    """A group's episodes have ended and are scored; filters have not run yet."""


@hookspec
def miles_group_dropped(run: RunInfo, group_id: str, reason: str) -> None:
    """A group will not train; the ledger says `dropped(reason)`."""


@hookspec
def miles_batch_ready(run: RunInfo, batch: Batch) -> Batch | None:
    """A batch is complete. Return a `Batch` of the same groups (other order, other trajectories) to replace it, None to
    leave it. Implementations are chained: each sees what the one before it returned. Groups may not be added or
    lost."""


@hookspec
def miles_before_train_step(run: RunInfo, batch: Batch) -> None:
    """The batch goes to the backend now; it is on disk before the step counts as taken."""


@hookspec
def miles_after_train_step(run: RunInfo, batch: Batch, report: StepReport) -> None:
    """The optimizer has moved; the new version is not published yet."""


@hookspec
def miles_version_published(run: RunInfo, published: VersionPublished) -> None:
    """Every engine acknowledged the version with matching checksums."""


@hookspec
def miles_checkpoint_saved(run: RunInfo, checkpoint: CheckpointSaved) -> None:
    """A complete checkpoint stands on disk; a resumed run would continue from it."""


@hookspec
def miles_evaluation_finished(run: RunInfo, point: EvaluationPoint) -> None:
    """One data set was evaluated under one version; `point` says which and how well."""


@hookspec
def miles_run_finished(run: RunInfo, error: BaseException | None) -> None:
    """The run ends: `error` None when it completed. Called once, also after a failure or Ctrl-C."""
