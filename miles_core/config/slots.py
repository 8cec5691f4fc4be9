"""Where a run config names components: which hook each name belongs to, and which keys are the component's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from miles_core.config.run import RunConfig
from miles_core.config.sections import ComponentSection

__all__ = ["ENVIRONMENT_HOOKS", "SECTION_HOOKS", "Slot", "slots"]

ENVIRONMENT_HOOKS = ("miles_agent_environments", "miles_generate_environments", "miles_rollout_environments")
"""`[environment] use` may name a component of any of the three layers; names are unique across them."""

SECTION_HOOKS: dict[str, tuple[str, ...]] = {
    "data": ("miles_data_sources",),
    "environment": ENVIRONMENT_HOOKS,
    "reward": ("miles_rewards",),
    "engine": ("miles_engines",),
    "backend": ("miles_train_backends",),
    "transport": ("miles_weight_transports",),
    "launcher": ("miles_launchers",),
}
"""Sections that choose exactly one component."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One place of a config that names a component. `key` is the dotted key of the name, `prefix` that of its settings;
    `ignored` are settings that belong to the core."""

    hooks: tuple[str, ...]
    key: str
    name: str
    prefix: str
    settings: dict[str, Any]


def _named(key: str, hook: str, section: ComponentSection) -> Slot:
    """A key that holds a component's name, or its table."""
    return Slot(hooks=(hook,), key=key, name=section.use, prefix=f"{key}.", settings=section.settings)


def slots(config: RunConfig) -> Iterator[Slot]:
    """Every component that the config names, in the order of the config's fields."""
    yield _named("model.family", "miles_model_families", config.model.family)
    for section, hooks in SECTION_HOOKS.items():
        chosen = getattr(config, section)
        yield Slot(hooks=hooks, key=f"{section}.use", name=chosen.use, prefix=f"{section}.", settings=chosen.settings)
    if config.teacher is not None:
        yield _named("teacher.engine", "miles_engines", config.teacher.engine)
    if config.evaluation.placement == "dedicated":
        yield _named("evaluation.engine", "miles_engines", config.evaluation.engine)
    yield _named("sessions.matcher", "miles_message_matchers", config.sessions.matcher)
    objective = config.objective
    named = [
        ("miles_advantage_estimators", "objective.algorithm", (objective.algorithm,)),
        ("miles_loss_terms", "objective.terms", objective.terms),
        ("miles_corrections", "objective.corrections", objective.corrections),
    ]
    for hook, key, names in named:
        for name in names:
            yield Slot(
                hooks=(hook,),
                key=key,
                name=name,
                prefix=f"objective.{name}.",
                settings=dict(objective.settings(name)),
            )
    for section, hook in (("filters", "miles_group_filters"), ("trackers", "miles_trackers")):
        chosen = getattr(config, section)
        for name in chosen.use:
            yield Slot(
                hooks=(hook,),
                key=f"{section}.use",
                name=name,
                prefix=f"{section}.{name}.",
                settings=dict(chosen.settings(name)),
            )
    for index, dataset in enumerate(config.evaluation.datasets):
        prefix = f"evaluation.datasets.{index}."
        yield Slot(
            hooks=("miles_data_sources",),
            key=f"{prefix}use",
            name=dataset.use,
            prefix=prefix,
            settings=dataset.settings,
        )
