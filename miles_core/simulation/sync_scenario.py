"""A scenario of `miles simulate sync`: a model, a trainer, engines and the links between them, as one TOML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from miles_core.config.load import problems_of
from miles_core.config.origins import OriginTree, read_toml
from miles_core.config.sections import Section
from miles_core.errors import ConfigError
from miles_core.simulation.scenario import override_key
from miles_core.simulation.sync_weights import ModelSection, Weights, WeightsSection

__all__ = [
    "ClusterSection",
    "PublishSection",
    "SyncEngines",
    "SyncScenario",
    "SyncTrainer",
    "load_sync_scenario",
    "sync_scenario_of",
]


class ClusterSection(Section):
    """The links. The defaults are the published figures' nodes: eight H100 on NVLink, a 400 Gb/s adapter each."""

    gpus: int = Field(default=8, ge=1)
    """GPUs of a node."""

    nic: float = Field(default=50.0, gt=0)
    """GB/s of one network adapter, one way (400 Gb/s)."""

    nics: int = Field(default=8, ge=1)
    """Adapters of a node."""

    nvlink: float = Field(default=450.0, gt=0)
    """GB/s of one GPU's NVLink, one way."""


class SyncTrainer(Section):
    """The trainer's layout. What tensor, pipeline and context parallelism leave of its GPUs is data parallel."""

    nodes: int = Field(ge=1)
    """Nodes."""

    tensor: int = Field(default=1, ge=1)
    """Tensor parallel ranks."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages. Stages hold different layers and publish them at the same time."""

    context: int = Field(default=1, ge=1)
    """Context parallel ranks: they hold the same weights."""

    expert: int = Field(default=1, ge=1)
    """Ranks of a stage that share its experts."""


class SyncEngines(Section):
    """The engines, all alike."""

    nodes: int = Field(ge=1)
    """Nodes of all engines together."""

    tensor: int = Field(default=1, ge=1)
    """GPUs of one engine. Each holds its part of the dense weights and of the experts, divided or by the expert."""


class PublishSection(Section):
    """One publish."""

    bytes_per_parameter: float = Field(default=2.0, gt=0)
    """Of what travels: 2 for bfloat16."""

    bucket: float = Field(default=1.0, gt=0)
    """GB of a bucket."""

    engine_seconds: float = Field(default=0.0, ge=0)
    """What engines do with the weights before they serve them, such as quantization."""


class SyncScenario(Section):
    """The whole of a scenario file: `[model]` or `[weights]`, and the others."""

    model: ModelSection | None = None
    """An architecture."""

    weights: WeightsSection | None = None
    """Or a size."""

    cluster: ClusterSection = ClusterSection()
    trainer: SyncTrainer
    engines: SyncEngines
    publish: PublishSection = PublishSection()

    @model_validator(mode="after")
    def _fits(self) -> SyncScenario:
        if (self.model is None) == (self.weights is None):
            raise ValueError("give one of [model] (an architecture) and [weights] (parameters and tensors)")
        trainer, engines = self.trainer, self.engines
        gpus = trainer.nodes * self.cluster.gpus
        ranks = trainer.tensor * trainer.pipeline * trainer.context
        if gpus % ranks:
            raise ValueError(f"the trainer's {gpus} GPUs are no multiple of tensor × pipeline × context = {ranks}")
        if self.model is not None and trainer.pipeline > self.model.num_hidden_layers:
            raise ValueError(f"{trainer.pipeline} stages for {self.model.num_hidden_layers} layers")
        if (gpus // trainer.pipeline) % trainer.expert:
            raise ValueError(f"a stage's {gpus // trainer.pipeline} GPUs are no multiple of expert = {trainer.expert}")
        if (engines.nodes * self.cluster.gpus) % engines.tensor:
            raise ValueError(
                f"the engines' {engines.nodes * self.cluster.gpus} GPUs are no multiple of tensor = {engines.tensor}"
            )
        return self

    @cached_property
    def stages(self) -> list[Weights]:
        """What each pipeline stage of the trainer holds."""
        sized = self.model or self.weights
        assert sized is not None
        return sized.stages(self.trainer.pipeline)

    @property
    def sources(self) -> int:
        """GPUs of one stage, each with an adapter."""
        return self.trainer.nodes * self.cluster.gpus // self.trainer.pipeline

    @property
    def engine_count(self) -> int:
        """Engines."""
        return self.engines.nodes * self.cluster.gpus // self.engines.tensor


def load_sync_scenario(path: Path, overrides: Sequence[str] = ()) -> SyncScenario:
    """Read a scenario; `overrides` are `section.key=value`, the value as TOML. Raises `ConfigError` with all of its
    problems."""
    tree, origins = read_toml(path)
    for override in overrides:
        override_key(tree, origins, override)
    return sync_scenario_of(tree, origins)


def sync_scenario_of(tree: Mapping[str, Any], origins: OriginTree) -> SyncScenario:
    """Validate a parsed scenario."""
    try:
        return SyncScenario.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error, origins, model=SyncScenario)) from error
