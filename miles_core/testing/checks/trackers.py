"""Laws of trackers: they take what a run logs, again after a crash, and end cleanly.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

from typing import Any

from miles_core.testing.kit import Case, Check

__all__ = ["CHECKS"]

CONFIG: dict[str, object] = {"run": {"name": "check", "steps": 3}, "model": {"path": "tiny:0"}}
STEP: dict[str, dict[str, float]] = {
    "rollout": {"reward/mean": 0.5, "tokens/total": 120.0},
    "train": {"loss": -0.1, "grad_norm": 1.5},
    "publish": {"seconds": 0.25},
    "system": {"memory": 1e9},
    "eval": {"heldout/mean": 0.5, "heldout/standard_error": 0.05},
}


def a_run_is_logged(case: Case) -> None:
    tracker = case.create()
    tracker.open(case.new_directory(), CONFIG)
    for step in range(3):
        for kind, metrics in STEP.items():
            tracker.log(step, metrics, kind=kind)
    tracker.close()


def every_finite_number_is_taken(case: Case) -> None:
    tracker = case.create()
    tracker.open(case.new_directory(), CONFIG)
    numbers: dict[str, float] = {"zero": 0.0, "huge": 1e300, "small": -1e-300, "whole": 3, "a name/with (signs)": 1.0}
    try:
        for kind in STEP:
            try:
                tracker.log(1, numbers, kind=kind)
                tracker.log(1, {}, kind=kind)
            except Exception as error:
                raise AssertionError(
                    f"finite numbers of kind {kind!r} under other names than the core's raise "
                    f"{type(error).__name__}: {error}"
                ) from error
    finally:
        tracker.close()


def logging_again_replaces(case: Case) -> None:
    tracker = case.create()
    directory = case.new_directory()
    tracker.open(directory, CONFIG)
    for value in (1.0, 2.0):
        try:
            tracker.log(1, {"loss": value, "grad_norm": 1.0}, kind="train")
        except Exception as error:
            raise AssertionError(f"logging a step again raises {type(error).__name__}: {error}") from error
    tracker.close()
    for read in case.example.inputs:
        found = [value for kind, step, name, value in read(directory) if (kind, step, name) == ("train", 1, "loss")]
        assert found == [2.0], f"train/loss of step 1 was logged as 1, then as 2, and reads {found}"


def a_resumed_run_opens_the_directory_again(case: Case) -> None:
    directory = case.new_directory()
    for _ in range(2):
        tracker = case.create()
        try:
            tracker.open(directory, CONFIG)
            tracker.log(1, {"loss": 1.0, "grad_norm": 1.0}, kind="train")
        except Exception as error:
            raise AssertionError(
                f"a second tracker cannot go on in the run directory of the first: {type(error).__name__}: {error}"
            ) from error
        finally:
            tracker.close()


def close_is_idempotent(case: Case) -> None:
    tracker: Any = case.create()
    tracker.open(case.new_directory(), CONFIG)
    for _ in range(2):
        try:
            tracker.close()
        except Exception as error:
            raise AssertionError(f"close() raises when it is called again: {type(error).__name__}: {error}") from error


CHECKS: tuple[Check, ...] = (
    a_run_is_logged,
    every_finite_number_is_taken,
    logging_again_replaces,
    a_resumed_run_opens_the_directory_again,
    close_is_idempotent,
)
