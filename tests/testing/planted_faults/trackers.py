"""Faults of trackers."""

from __future__ import annotations

import json

from miles_core.contracts.component import Example
from miles_core.runs.metrics import SqliteTracker
from planted_faults import scaffolded

Good = scaffolded("trackers")
GOOD = (Good, SqliteTracker)


class KnowsTwoKinds(Good):
    """Knows training and evaluation only."""

    def log(self, step, metrics, *, kind):
        assert kind in ("train", "eval"), kind
        super().log(step, metrics, kind=kind)


class WantsLoss(Good):
    """Believes that every step has a loss."""

    def log(self, step, metrics, *, kind):
        if kind == "train":
            assert metrics["loss"] is not None
        super().log(step, metrics, kind=kind)


class OnlyOnce(Good):
    """A step may be logged once."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = set()

    def log(self, step, metrics, *, kind):
        if (step, kind) in self.seen:
            raise ValueError("logged already")
        self.seen.add((step, kind))
        super().log(step, metrics, kind=kind)


class Appends(Good):
    """Counts a step that is taken again twice."""

    @classmethod
    def example(cls, bench):
        def read(directory):
            rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            return [(r["kind"], r["step"], name, r[name]) for r in rows for name in r if name not in ("kind", "step")]

        return Example(inputs=(read,))


class NewDirectory(Good):
    """Refuses a directory that it has been in."""

    def open(self, run_directory, resolved_config):
        (run_directory / "tracker").mkdir()
        super().open(run_directory, resolved_config)


class ClosesOnce(Good):
    """A second close fails."""

    def close(self):
        assert self._stream is not None
        super().close()


FAULTS = {
    "a_run_is_logged": (KnowsTwoKinds,),
    "every_finite_number_is_taken": (WantsLoss,),
    "logging_again_replaces": (OnlyOnce, Appends),
    "a_resumed_run_opens_the_directory_again": (NewDirectory,),
    "close_is_idempotent": (ClosesOnce,),
}
