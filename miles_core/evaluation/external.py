"""External evaluation: a function of the user's, in a process of its own, measures a directory of weights.

`python -m miles_core.evaluation.external FUNCTION DIRECTORY VERSION` calls `FUNCTION(DIRECTORY, VERSION)` and prints
what it returns as one JSON line. The function may be slow, use a device, or crash: training goes on.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.contracts.events import EvaluationPoint
from miles_core.errors import MilesError
from miles_core.lifeline import Lifeline
from miles_core.rollout.functions import load_function

__all__ = ["main", "points_of"]

_KEYS = ("mean", "standard_error", "prompts", "samples", "truncated", "missing", "pass_at", "version")


def points_of(answer: object, *, version: int, seconds: float) -> list[EvaluationPoint]:
    """The points in what a function returned: by data set, a number (the mean), or a mapping with `mean` and any of
    `standard_error` (over prompts), `prompts`, `samples`, `truncated` (a share), `missing`, `pass_at` (by k), `version`
    (that it measured).

    Raises `MilesError` for anything else, for a number that is not finite, and for another version than the one whose
    weights it was given: the point is refused.
    """
    if not isinstance(answer, Mapping) or not answer:
        raise MilesError(f"the function returned {answer!r:.200}, expected a number or a mapping by data set")
    return [_point(str(name), value, version, seconds) for name, value in answer.items()]


def _point(name: str, value: object, version: int, seconds: float) -> EvaluationPoint:
    told: Mapping[str, Any] = value if isinstance(value, Mapping) else {"mean": value}
    if unknown := sorted(set(told) - set(_KEYS)):
        raise MilesError(f"data set {name!r}: unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    measured = told.get("version", version)
    if measured != version:
        raise MilesError(f"data set {name!r}: version {measured} was measured, not {version}: the point is refused")

    def number(key: str, default: object = 0) -> float:
        return _finite(name, key, told.get(key, default))

    return EvaluationPoint(
        dataset=name,
        version=version,
        mode="external",
        mean=number("mean", None),
        standard_error=number("standard_error"),
        truncated=number("truncated"),
        prompts=int(number("prompts")),
        samples=int(number("samples", 1)),
        missing=int(number("missing")),
        pass_at={int(k): _finite(name, f"pass@{k}", p) for k, p in dict(told.get("pass_at") or {}).items()},
        seconds=seconds,
    )


def _finite(name: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MilesError(f"data set {name!r}: {key} is {value!r}, expected a finite number")
    return float(value)


def main(arguments: list[str]) -> None:
    """Call the function. What it prints goes to stderr: stdout carries the answer alone."""
    Lifeline(grace=0.0)
    reference, directory, version = arguments
    answers, sys.stdout = sys.stdout, sys.stderr
    answer = load_function(reference, key="evaluation.callable")(Path(directory), int(version))
    print(json.dumps({"answer": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
