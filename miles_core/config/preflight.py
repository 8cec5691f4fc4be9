"""Preflight: everything that can be known to be wrong before anything starts, all at once.

Each check is a function from what is known to problems; a check whose ground is missing (its component could not be
built) says nothing, the missing ground is the problem.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_core.config.load import LoadedConfig, problems_of
from miles_core.config.objective import objective_problems
from miles_core.config.origins import flatten
from miles_core.config.slots import ENVIRONMENT_HOOKS, Slot, slots
from miles_core.contracts.component import Component
from miles_core.errors import ConfigError, Problem, nearest
from miles_core.plugins import PluginManager, Registration

__all__ = ["PreflightReport", "preflight"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What was found: `problems` stop a run, `notes` are worth reading."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    def raise_problems(self) -> None:
        """Raises `ConfigError` with all problems, if there are any."""
        if self.problems:
            raise ConfigError(self.problems)


def preflight(loaded: LoadedConfig, plugins: PluginManager) -> PreflightReport:
    """Check a config without starting an engine or loading a weight."""
    problems: list[Problem] = []
    found: list[tuple[Slot, Registration]] = []
    for slot in slots(loaded.config):
        registration = _find(slot, loaded, plugins, problems)
        if registration is not None:
            problems += _section_problems(slot, registration, loaded)
            found.append((slot, registration))
    problems += _combination_problems(found, loaded)
    problems += objective_problems(found, loaded)
    problems += _number_problems(loaded)
    problems += _evaluation_problems(found, loaded)
    problems += _directory_problems(loaded)
    notes = [failure.message for failure in plugins.failures]
    notes += [
        f"{slot.key} = {slot.name!r}: histories that differ only in what this matcher does not compare become one"
        for slot, registration in found
        if getattr(registration.component, "merges_histories", False)
    ]
    if loaded.config.schedule.over_sample:
        notes.append(
            f"schedule.over_sample = {loaded.config.schedule.over_sample}: which groups train depends on which finish "
            "first, so that two runs of this config differ"
        )
    return PreflightReport(problems=tuple(problems), notes=tuple(notes))


def _problem(loaded: LoadedConfig, key: str, message: str, *, value: object = None, hint: str = "") -> Problem:
    return Problem(key=key, message=message, origin=loaded.origin(key), value=value, hint=hint)


def _find(slot: Slot, loaded: LoadedConfig, plugins: PluginManager, problems: list[Problem]) -> Registration | None:
    for hook in slot.hooks:
        if slot.name in plugins.names(hook):
            return plugins.find(hook, slot.name)
    allowed = [name for hook in slot.hooks for name in plugins.names(hook)]
    kind = "environment" if slot.hooks == ENVIRONMENT_HOOKS else slot.hooks[0].removeprefix("miles_").replace("_", " ")
    failed = "; ".join(f.message for f in plugins.failures)
    hint = "correct the name, or install the plugin that offers it (`miles plugins list` shows what is installed)"
    message = f"no {kind} of this name; {nearest(slot.name, allowed)}"
    problems.append(
        _problem(
            loaded, slot.key, f"{message}; not loaded: {failed}" if failed else message, value=slot.name, hint=hint
        )
    )
    return None


def _section_problems(slot: Slot, registration: Registration, loaded: LoadedConfig) -> list[Problem]:
    """What the component's own model says of its section."""
    model = registration.component.Config
    try:
        model.model_validate(slot.settings)
    except ValidationError as error:
        found = problems_of(error, loaded.origins, model=model, prefix=slot.prefix)
        return [
            dataclasses.replace(p, message=f"{p.message} (component {slot.name!r} of plugin {registration.plugin!r})")
            for p in found
        ]
    return []


def _combination_problems(found: Sequence[tuple[Slot, Registration]], loaded: LoadedConfig) -> Iterator[Problem]:
    """`requires` and `conflicts` of every chosen component."""
    values = flatten(loaded.config.model_dump(mode="python"))
    for slot, registration in found:
        component: type[Component[Any]] = registration.component
        for requirement in component.requires:
            if requirement.key.startswith("import:"):
                module = requirement.key.removeprefix("import:")
                if importlib.util.find_spec(module) is None:
                    yield _problem(
                        loaded,
                        slot.key,
                        f"needs the Python package {module!r}, which is not installed, because {requirement.reason}",
                        value=slot.name,
                        hint=f"python -m pip install {module.replace('_', '-')}",
                    )
            elif values.get(requirement.key) not in requirement.values:
                allowed = ", ".join(repr(v) for v in requirement.values)
                yield _problem(
                    loaded,
                    slot.key,
                    f"needs {requirement.key} to be {allowed}, but it is {values.get(requirement.key)!r} "
                    f"({loaded.origin(requirement.key)}), because {requirement.reason}",
                    value=slot.name,
                    hint=f"set {requirement.key}, or choose another {slot.key}",
                )
        for conflict in component.conflicts:
            key = conflict.key if conflict.values else _key_in(values, conflict.key)
            if key is not None and (not conflict.values or values.get(key) in conflict.values):
                yield _problem(
                    loaded,
                    slot.key,
                    f"cannot go with {key} = {values[key]!r} ({loaded.origin(key)}): {conflict.reason}",
                    value=slot.name,
                    hint=f"change {slot.key} or {conflict.key}",
                )


def _key_in(values: Mapping[str, Any], key: str) -> str | None:
    """The key, or the first one of the table of that name, where the config has a value for it."""
    return next((k for k, v in values.items() if v is not None and (k == key or k.startswith(f"{key}."))), None)


def _number_problems(loaded: LoadedConfig) -> Iterator[Problem]:
    """Numbers that are legal alone and not together."""
    config = loaded.config
    schedule, sampling = config.schedule, config.sampling
    if config.objective.algorithm == "grpo" and schedule.group_size < 2:
        yield _problem(
            loaded,
            "schedule.group_size",
            "grpo compares the episodes of a group, and a group of one has nothing to compare: every advantage is 0",
            value=schedule.group_size,
            hint="set schedule.group_size to 2 or more, typically 8",
        )
    if sampling.max_tokens and sampling.max_tokens <= sampling.max_new_tokens:
        yield _problem(
            loaded,
            "sampling.max_tokens",
            f"leaves no room for a prompt beside sampling.max_new_tokens = {sampling.max_new_tokens}",
            value=sampling.max_tokens,
            hint="raise sampling.max_tokens, or set it to 0 for the model's own limit",
        )
    if schedule.mode == "async" and 0 < schedule.max_running < schedule.group_size:
        yield _problem(
            loaded,
            "schedule.max_running",
            f"is below schedule.group_size = {schedule.group_size}: no group could ever run at once",
            value=schedule.max_running,
            hint="set it to a multiple of schedule.group_size, or 0",
        )
    for key, mode in (("over_sample", "sync"), ("adaptive", "async")):
        if getattr(schedule, key) and schedule.mode != mode:
            yield _problem(
                loaded,
                f"schedule.{key}",
                f"does nothing with schedule.mode = {schedule.mode!r}: it belongs to {mode!r}",
                value=getattr(schedule, key),
                hint=f'set schedule.mode = "{mode}", or leave schedule.{key} out',
            )


def _evaluation_problems(found: Sequence[tuple[Slot, Registration]], loaded: LoadedConfig) -> Iterator[Problem]:
    """What each placement needs, and what does nothing with it."""
    section, mode = loaded.config.evaluation, loaded.config.run.mode
    names = [d.name for d in section.datasets]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield _problem(
            loaded,
            "evaluation.datasets",
            f"two data sets are named {name!r}; their metrics would overwrite each other",
            hint="give each its own name",
        )
    external = section.placement == "external"
    if external != bool(section.callable):
        yield _problem(
            loaded,
            "evaluation.callable",
            "names the function of placement 'external'" + (", which needs one" if external else " and does nothing"),
            value=section.callable,
            hint='set evaluation.placement = "external" and evaluation.callable = "file.py:function", or neither',
        )
    if external and names:
        yield _problem(
            loaded,
            "evaluation.datasets",
            "does nothing with evaluation.placement = 'external': the function has data of its own",
            hint="leave the data sets out, or choose another placement",
        )
    asked = section.every or any(f"evaluation.{key}" in loaded.origins for key in ("at_start", "placement"))
    if asked and not names and not external:
        yield _problem(
            loaded,
            "evaluation.datasets",
            "evaluation is configured, but there is no data set to evaluate on",
            hint="add a [[evaluation.datasets]] table with name, use and the source's keys",
        )
    if section.placement == "dedicated" and mode == "supervised":
        yield _problem(
            loaded,
            "evaluation.placement",
            "has nothing to sample with run.mode = 'supervised': held-out loss is computed by the trainer",
            value=section.placement,
            hint='set evaluation.placement = "shared", or "external" with a function of yours',
        )
    transport = next((r.component for s, r in found if s.key == "transport.use"), None)
    if section.placement == "dedicated" and not getattr(transport, "several_fleets", True):
        yield _problem(
            loaded,
            "evaluation.placement",
            f"cannot go with transport.use = {loaded.config.transport.use!r}: it serves one fleet of engines, and the "
            "evaluation's are another",
            value=section.placement,
            hint='use transport = "shared_memory" where all engines are on the trainer\'s host, or '
            'evaluation.placement = "external"',
        )
    idle = {"shared": ("overflow", "timeout", "engine", "engine.use"), "external": ("engine", "engine.use")}
    for key in idle.get(section.placement, ()):
        if f"evaluation.{key}" in loaded.origins:
            yield _problem(
                loaded,
                f"evaluation.{key}",
                f"does nothing with evaluation.placement = {section.placement!r}",
                hint="choose the placement that it belongs to, or leave it out",
            )


def _directory_problems(loaded: LoadedConfig) -> Iterator[Problem]:
    """Rights and space where the run will write."""
    parent = _existing(loaded.config.run.directory)
    if not os.access(parent, os.W_OK):
        yield _problem(
            loaded,
            "run.directory",
            f"{parent} cannot be written to by this user",
            value=str(loaded.config.run.directory),
            hint="choose another directory, or change its rights",
        )
    elif shutil.disk_usage(parent).free < 1 << 30:
        free = shutil.disk_usage(parent).free / (1 << 20)
        yield _problem(
            loaded,
            "run.directory",
            f"only {free:.0f} MiB are free there; a run needs at least 1 GiB for checkpoints and rollouts",
            value=str(loaded.config.run.directory),
            hint="free some space, or choose another disk",
        )
    path = loaded.config.run.directory / loaded.config.run.name
    if path.exists() and not path.is_dir():
        yield _problem(
            loaded, "run.name", f"{path} is a file", value=loaded.config.run.name, hint="choose another name"
        )


def _existing(path: Path) -> Path:
    """The nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
