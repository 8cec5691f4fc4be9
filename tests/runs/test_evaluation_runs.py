"""Whole runs of the tiny example by every placement of evaluation: the same weights, so the same points."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.contracts.events import EvaluationRecord
from miles_core.runs.metrics import MetricsStore
from tests.runs.conftest import train

pytest.importorskip("torch")
SMALL = ("schedule.batch_groups=2", "schedule.group_size=4", "evaluation.every=2")

FUNCTION = """
from pathlib import Path

def measure(directory, version):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    AutoTokenizer.from_pretrained(directory)
    return {"norm": float(sum(p.detach().norm() for p in model.parameters()))}
"""


def points(path: Path) -> tuple[dict[str, list[tuple[int, float]]], list[EvaluationRecord]]:
    store = MetricsStore(path / "metrics.sqlite")
    try:
        return {n: store.series("eval", n) for n in store.names("eval")}, store.evaluations()
    finally:
        store.close()


@pytest.mark.slow
def test_dedicated_points_are_those_of_shared_engines(tmp_path: Path) -> None:
    shared, _ = points(train(tmp_path, "shared", *SMALL))
    path = train(
        tmp_path, "dedicated", *SMALL, "evaluation.placement=dedicated", "evaluation.engine={use='embedded', threads=1}"
    )
    dedicated, records = points(path)
    assert dedicated == shared
    assert {r.version for r in records if r.outcome == "measured"} == {0, 2, 4}
    assert (path / "evaluation" / "logs" / "engine-0.log").exists()


@pytest.mark.slow
def test_an_external_function_loads_the_weights_of_each_version(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text(FUNCTION)
    external = ("evaluation.placement=external", f"evaluation.callable={tmp_path}/bench.py:measure")
    found, records = points(train(tmp_path, "external", *SMALL, *external, "evaluation.datasets=[]"))
    norms = dict(found["norm/external/mean"])
    assert norms.keys() == {0, 2, 4}
    assert len(set(norms.values())) == 3, "each version has weights of its own"
    assert {r.outcome for r in records} == {"measured"}
