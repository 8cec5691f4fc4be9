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
                hint="list it in objective.terms or objective.corrections, choose it as objective.algorithm, or remove it",
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
            message=f"{', '.join(sorted(trainers))} trains a critic on returns, which {section.algorithm} does not give",
            origin=loaded.origin("objective.terms"),
            value=list(section.terms),
            hint='set objective.algorithm = "ppo", or remove the term',
        )


def _wants_values(registration: Registration) -> bool:
    return Needs.VALUES in getattr(registration.component, "needs", Needs.NOTHING)
