"""The three placements of evaluation, over stub engines and a stub trainer: a point is filed under the version that it
measured or refused with its reason, training waits for the hand-over alone, and the last version always has a point."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from miles_core import hookimpl
from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Engine
from miles_core.contracts.events import EvaluationPoint, EvaluationRecord
from miles_core.errors import MilesError
from miles_core.evaluation.external import points_of
from miles_core.runs.loop import Run
from miles_core.runs.metrics import MetricsStore
from miles_core.runs.report.page import evaluation_rows
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine
from tests.runs.stubs import Setup

DATASET = (
    "evaluation.datasets=[{name='heldout', use='jsonl', path='examples/tiny.jsonl[64:68]', samples=2, greedy=true}]"
)
DEDICATED = (DATASET, "evaluation.placement=dedicated", "evaluation.engine=measuring", "evaluation.every=1")


class Placements(Setup):
    """A run over stubs, with a second stub engine for dedicated evaluation."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path, monkeypatch)
        self.measuring = StubEngine(hashed_script(200, 4))
        self.starts = 0
        setup = self

        class Measuring(Engine[ComponentConfig]):
            """The stub engine of evaluation, in this process. Started again, it is a new one without weights."""

            async def start(self, launcher: object, start: object) -> list[str]:
                setup.starts += 1
                self.stack = contextlib.AsyncExitStack()
                return [await self.stack.enter_async_context(stub_engine(setup.measuring))]

            async def stop(self) -> None:
                if hasattr(self, "stack"):
                    await self.stack.aclose()

        class Plugin:
            @hookimpl
            def miles_engines(self) -> dict[str, type]:
                return {"measuring": Measuring}

            @hookimpl
            def miles_evaluation_finished(self, point: EvaluationPoint) -> None:
                setup.events.append(f"point {point.version} {point.mode}")

            @hookimpl
            def miles_before_train_step(self, batch: Any) -> None:
                setup.events.append(f"step {batch.step + 1}")

        self.plugins.register(Plugin(), name="measuring")

    def records(self) -> dict[int, EvaluationRecord]:
        """What became of each version as a whole."""
        store = MetricsStore(self.directory / "tiny" / "metrics.sqlite")
        try:
            return {r.version: r for r in store.evaluations() if not r.dataset}
        finally:
            store.close()

    def measured(self) -> list[int]:
        return [v for v, r in self.records().items() if r.outcome == "measured"]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placements:
    return Placements(tmp_path, monkeypatch)


def test_shared_points_are_of_the_version_that_the_rollout_engines_hold(setup: Placements) -> None:
    setup.go(DATASET, "evaluation.every=2")
    assert setup.measured() == [0, 2, 3]
    assert [e for e in setup.events if e.startswith("point")] == [
        f"point {v} {mode}" for v in (0, 2, 3) for mode in ("sampled", "greedy")
    ]


def test_dedicated_points_are_of_the_version_that_was_handed_over(setup: Placements) -> None:
    setup.go(*DEDICATED)
    assert setup.measured() == [0, 1, 2, 3]
    assert setup.measuring.version == 3
    assert setup.measuring.weights == setup.engine.weights, "the very bytes that were published"
    evaluated = {tuple(r["input_ids"]) for r in setup.measuring.requests}
    assert not evaluated & {tuple(r["input_ids"]) for r in setup.engine.requests}


def test_the_next_step_starts_before_a_dedicated_evaluation_ends(setup: Placements) -> None:
    setup.measuring.latency = 0.7
    setup.go(*DEDICATED, "evaluation.every=2", "evaluation.at_start=false", "run.steps=4", "trackers=['sqlite']")
    events = [e for e in setup.events if e.startswith(("step", "point"))]
    assert events.index("step 3") < events.index("point 2 sampled")
    assert setup.measured() == [2, 4]
    store = MetricsStore(setup.directory / "tiny" / "metrics.sqlite")
    try:
        spans = {(name, step): (begin, end) for _, name, step, begin, end in store.spans()}
        hand_over = dict(store.series("time", "trainer/hand over"))
    finally:
        store.close()
    between = spans["train", 3][0] - spans["publish", 2][1]
    assert between < hand_over[2] + spans["generate", 3][1] - spans["generate", 3][0] + 0.5
    assert spans["evaluate", 2][1] > spans["train", 3][0]


def test_overflow_skips_with_its_reason_and_never_the_last(setup: Placements) -> None:
    setup.measuring.latency = 0.4
    setup.go(*DEDICATED, "evaluation.overflow=skip", "run.steps=5")
    records = setup.records()
    skipped = [r for r in records.values() if r.outcome == "skipped"]
    assert skipped
    assert all("was still being measured" in r.reason for r in skipped)
    assert records[5].outcome == "measured"


def test_overflow_waits_and_leaves_nothing_out(setup: Placements) -> None:
    setup.measuring.latency = 0.2
    setup.go(*DEDICATED)
    assert setup.measured() == [0, 1, 2, 3]


def test_a_point_of_a_version_that_changed_meanwhile_is_refused(setup: Placements) -> None:
    async def meddle(path: str) -> None:
        if path == "/generate" and setup.measuring.version == 1:
            setup.measuring.version = 7

    setup.measuring.on_call = meddle
    setup.go(*DEDICATED)
    records = setup.records()
    assert records[1].outcome == "refused"
    assert "under version 1 got tokens of version [7]" in records[1].reason
    assert [v for v, r in records.items() if r.outcome == "measured"] == [0, 2, 3]
    assert "point 1 sampled" not in setup.events
    assert setup.starts == 2, "engines that were not what they should be are started anew"


def test_an_engine_that_does_not_take_the_version_costs_its_point_and_not_the_run(setup: Placements) -> None:
    async def refuse(path: str) -> None:
        if path == "/stage_weights" and setup.starts == 1:
            raise RuntimeError("no room")

    setup.measuring.on_call = refuse
    setup.go(*DEDICATED)
    records = setup.records()
    assert records[0].outcome == "refused"
    assert "was not published" in records[0].reason
    assert records[3].outcome == "measured"


def test_the_last_version_is_measured_once_more_when_it_was_refused(setup: Placements) -> None:
    async def refuse(path: str) -> None:
        if path in ("/commit_weights", "/switch_weights") and setup.starts == 1 and setup.measuring.staged[0] == 3:
            raise RuntimeError("not now")

    setup.measuring.on_call = refuse
    setup.go(*DEDICATED)
    assert setup.records()[3].outcome == "measured"


def test_a_last_version_that_cannot_be_measured_fails_the_run_and_resume_measures_it(setup: Placements) -> None:
    setup.measuring.garbage = True
    with pytest.raises(MilesError, match="none of 8 episodes was scored"):
        setup.go(*DEDICATED, "evaluation.every=0", "evaluation.at_start=false")
    assert setup.records()[3].outcome == "refused"
    setup.measuring.garbage = False
    setup.go(*DEDICATED, "evaluation.every=0", "evaluation.at_start=false")
    assert setup.records()[3].outcome == "measured"
    assert len(setup.trainer.batches) == 3, "no step is taken again for it"


def test_what_was_running_when_the_run_was_interrupted_is_measured_on_resume(setup: Placements) -> None:
    setup.trainer.fail_at = 2
    setup.measuring.latency = 0.5
    overrides = (*DEDICATED, "evaluation.every=2", "evaluation.at_start=false")
    with pytest.raises(MilesError):
        setup.go(*overrides)
    assert setup.records()[2].outcome == "running"
    setup.trainer.fail_at, setup.measuring.latency = None, 0.0
    setup.go(*overrides)
    assert setup.measured() == [2, 3]


EXTERNAL = """
import json
from pathlib import Path

def measure(directory, version):
    print("chatter")
    assert (directory / "model").is_file()
    return {"task": {"mean": version / 10, "standard_error": 0.1, "prompts": 5}, "other": 1}

def of_another_version(directory, version):
    return {"task": {"mean": 0.5, "version": version - 1}}

def crashes(directory, version):
    raise RuntimeError("no benchmark today")

def hangs(directory, version):
    import time
    time.sleep(60)
"""


@pytest.fixture
def external(setup: Placements) -> Placements:
    (setup.directory.parent / "bench.py").write_text(EXTERNAL)
    return setup


def _external(setup: Placements, name: str) -> tuple[str, ...]:
    function = f"evaluation.callable={setup.directory.parent}/bench.py:{name}"
    return ("evaluation.placement=external", function, "evaluation.at_start=false")


def test_an_external_function_gets_the_weights_and_gives_points(external: Placements) -> None:
    run = external.go(*_external(external, "measure"), "evaluation.every=2", "trackers=['sqlite']")
    assert external.measured() == [2, 3]
    store = MetricsStore(run.metrics_file)
    try:
        assert store.series("eval", "task/external/mean") == [(2, 0.2), (3, 0.3)]
        assert store.series("eval", "other/external/mean") == [(2, 1.0), (3, 1.0)]
    finally:
        store.close()
    assert not list(run.path.glob("evaluation/*")), "weights that were measured are removed"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("of_another_version", "version 2 was measured, not 3: the point is refused"),
        ("crashes", "no benchmark today"),
        ("hangs", "was not ready after 2 s"),
    ],
)
def test_an_external_function_that_gives_no_point_says_why(external: Placements, name: str, reason: str) -> None:
    with pytest.raises(MilesError, match=reason):
        external.go(*_external(external, name), "evaluation.timeout=2")
    assert reason in external.records()[3].reason
    assert len(external.trainer.batches) == 3


@pytest.mark.parametrize("answer", [None, {}, {"task": "good"}, {"task": {"meen": 1}}, {"task": True}, {"task": {}}])
def test_answers_that_are_no_points_are_refused(answer: object) -> None:
    with pytest.raises(MilesError):
        points_of(answer, version=1, seconds=0.0)


def test_the_report_has_every_version_with_its_reason(setup: Placements) -> None:
    setup.measuring.latency = 0.4
    run = setup.go(*DEDICATED, "evaluation.overflow=skip", "run.steps=4", "trackers=['sqlite']")
    store = MetricsStore(run.metrics_file)
    try:
        rows = evaluation_rows(store)
    finally:
        store.close()
    assert {r["version"] for r in rows} == {0, 1, 2, 3, 4}
    assert any(r["outcome"] == "skipped" and "was still being measured" in r["result"] for r in rows)
    assert any(r["version"] == 4 and r["name"] == "heldout, greedy" and "±" in r["result"] for r in rows)


def test_a_slow_evaluation_is_awaited_when_the_run_ends(setup: Placements) -> None:
    setup.measuring.latency = 0.5
    seen: list[Run] = []
    setup.go(*DEDICATED, "evaluation.every=0", "evaluation.at_start=false", observer=seen.append)
    assert setup.measured() == [3]
    assert [p.version for p in seen[0].points] == [3, 3]
