"""`RunConfig`: the whole of a run in one frozen object."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from miles_core.config.sections import (
    ComponentSection,
    EvaluationSection,
    FiltersSection,
    ModelSection,
    Named,
    ObjectiveSection,
    PluginsSection,
    RewardSection,
    RunSection,
    SamplingSection,
    ScheduleSection,
    Section,
    SessionsSection,
    TeacherSection,
    TrackersSection,
    _listed,
    _named,
)

__all__ = ["RunConfig"]


class RunConfig(Section):
    """One run. Every section that chooses a component may be written as its name alone."""

    run: RunSection
    """The run as a whole."""

    model: ModelSection
    """The policy."""

    data: Named
    """Data source of training prompts."""

    environment: Named = Field(default=ComponentSection(use="single_turn"), validate_default=True)
    """Environment: how an episode runs."""

    sessions: SessionsSection = SessionsSection()
    """Sessions of agents."""

    reward: Annotated[RewardSection, BeforeValidator(_named)]
    """Reward of an episode."""

    filters: Annotated[FiltersSection, BeforeValidator(_listed)] = FiltersSection()
    """Filters of finished groups."""

    sampling: SamplingSection
    """How episodes are sampled."""

    schedule: ScheduleSection
    """When episodes run."""

    objective: ObjectiveSection = ObjectiveSection()
    """What is optimised."""

    teacher: TeacherSection | None = None
    """Teacher of a distillation."""

    engine: Named = Field(default=ComponentSection(use="embedded"), validate_default=True)
    """Inference engine."""

    backend: Named = Field(default=ComponentSection(use="fsdp"), validate_default=True)
    """Train backend."""

    transport: Named = Field(default=ComponentSection(use="shared_memory"), validate_default=True)
    """Weight transport."""

    launcher: Named = Field(default=ComponentSection(use="local"), validate_default=True)
    """Where processes run."""

    evaluation: EvaluationSection = EvaluationSection()
    """Held-out evaluation."""

    trackers: Annotated[TrackersSection, BeforeValidator(_listed)] = TrackersSection()
    """Metrics sinks."""

    plugins: PluginsSection = PluginsSection()
    """Which plugins load."""
