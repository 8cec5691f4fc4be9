"""What may stand together in `[objective]`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from miles_core.config.load import LoadedConfig
from miles_core.config.slots import Slot
from miles_core.contracts.objective import Needs
from miles_core.errors import Problem, nearest
from miles_core.plugins import Registration

__all__ = ["objective_problems"]


def objective_problems(found: Sequence[tuple[Slot, Registration]], loaded: LoadedConfig) -> Iterator[Problem]:
    """Sections that nothing reads, coefficients that are no numbers, and parts that need one another."""
    section = loaded.config.objective
    named = (section.algorithm, *section.terms, *section.corrections)
    for name in section.model_extra or {}:
        if name not in named:
            yield Problem(
                key=f"objective.{name}",
                message=f"has no effect: {nearest(name, named)}",
                origin=loaded.origin(f"objective.{name}"),
                hint="list it in objective.terms or objective.corrections, choose it as algorithm, or remove it",
            )
    for name in sorted({n for n in section.terms if section.terms.count(n) > 1}):
        yield Problem(
            key="objective.terms",
            message=f"names {name!r} twice",
            origin=loaded.origin("objective.terms"),
            value=list(section.terms),
            hint="name it once; its weight is its coefficient",
        )
    for name in section.terms:
        coefficient = section.coefficient(name)
        if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not math.isfinite(coefficient):
            key = f"objective.{name}.coefficient"
            yield Problem(
                key=key,
                message="must be a finite number",
                origin=loaded.origin(key),
                value=coefficient,
                hint="the weight of the term in the loss, 1.0 by default",
            )
    yield from _critic_problems(found, loaded)
    yield from _teacher_problems(found, loaded)
    yield from _mode_problems(loaded)


def _critic_problems(found: Sequence[tuple[Slot, Registration]], loaded: LoadedConfig) -> Iterator[Problem]:
    """A critic is trained by a term and read by the algorithm; one without the other is a mistake."""
    section = loaded.config.objective
    readers = {r.name for slot, r in found if slot.key == "objective.algorithm" and _wants_values(r)}
    trainers = {r.name for slot, r in found if slot.key == "objective.terms" and _wants_values(r)}
    if readers and not trainers:
        yield Problem(
            key="objective.terms",
            message=f"{section.algorithm} reads a critic's values, but no term trains the critic",
            origin=loaded.origin("objective.terms"),
            value=list(section.terms),
            hint='add "value" to objective.terms',
        )
    if trainers and not readers:
        yield Problem(
            key="objective.terms",
            message=f"{_listed(trainers)} trains a critic on returns, which {section.algorithm} does not give",
            origin=loaded.origin("objective.terms"),
            value=list(section.terms),
            hint='set objective.algorithm = "ppo", or remove the term',
        )


def _teacher_problems(found: Sequence[tuple[Slot, Registration]], loaded: LoadedConfig) -> Iterator[Problem]:
    """A teacher and somebody who listens to it; at the student's temperature."""
    config = loaded.config
    parts = [r for slot, r in found if slot.key.startswith("objective.")]
    listeners = {r.name for r in parts if _wants(r, Needs.TEACHER) or _wants(r, Needs.TEACHER_TOP)}
    if listeners and config.teacher is None:
        yield Problem(
            key="teacher",
            message=f"{_listed(listeners)} learns from a teacher, and there is none",
            origin=loaded.origin("objective.terms"),
            hint="add [teacher] path, the teacher's model",
        )
    if config.teacher is None:
        return
    if not listeners:
        yield Problem(
            key="teacher",
            message="has no effect: no part of the objective learns from a teacher",
            origin=loaded.origin("teacher"),
            hint='add "distillation" to objective.terms, or remove [teacher]',
        )
    top = {r.name for r in parts if _wants(r, Needs.TEACHER_TOP)}
    if bool(top) != bool(config.teacher.top_k):
        yield Problem(
            key="teacher.top_k",
            message=f"{_listed(top)} learns from the teacher's likeliest tokens, and none are recorded"
            if top
            else "has no effect: no part of the objective learns from the teacher's likeliest tokens",
            origin=loaded.origin("teacher.top_k"),
            value=config.teacher.top_k,
            hint="set it to 8 or more" if top else 'add "distillation_top_k" to objective.terms, or remove it',
        )
    fixed = [r.name for slot, r in found if slot.key == "teacher.engine" and not _scores_at_temperature(r)]
    if config.sampling.temperature != 1.0 and fixed:
        yield Problem(
            key="sampling.temperature",
            message=f"must be 1.0 with a teacher on {fixed[0]!r}: it gives log-probs of given tokens at temperature 1, "
            "and student and teacher are compared at one temperature",
            origin=loaded.origin("sampling.temperature"),
            value=config.sampling.temperature,
            hint='set it to 1.0, or teacher.engine = "embedded"',
        )


def _scores_at_temperature(registration: Registration) -> bool:
    return bool(getattr(registration.component, "scores_at_temperature", False))


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _wants_values(registration: Registration) -> bool:
    return _wants(registration, Needs.VALUES)


def _wants(registration: Registration, need: Needs) -> bool:
    return need in getattr(registration.component, "needs", Needs.NOTHING)


def _mode_problems(loaded: LoadedConfig) -> Iterator[Problem]:
    """What supervised runs do not have."""
    config = loaded.config
    if config.run.mode != "supervised":
        return
    if config.environment.use != "supervised":
        yield Problem(
            key="environment.use",
            message="a supervised run takes its episodes from the data",
            origin=loaded.origin("environment.use"),
            value=config.environment.use,
            hint='remove it, or set run.mode = "reinforcement"',
        )
    for index, dataset in enumerate(config.evaluation.datasets):
        for key, unused in (("greedy", dataset.greedy), ("samples", dataset.samples != 1)):
            if unused:
                yield Problem(
                    key=f"evaluation.datasets.{index}.{key}",
                    message="a supervised run is measured by held-out loss: it samples nothing",
                    origin=loaded.origin(f"evaluation.datasets.{index}.{key}"),
                    hint="remove it",
                )
