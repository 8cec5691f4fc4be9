"""Commands on a finished run, over the real engine and the real trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.runs.audit import audit_run
from miles_core.runs.directory import RunDirectory
from tests.runs.conftest import ROOT, train

torch = pytest.importorskip("torch")


def miles(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=check)


def test_export_writes_what_transformers_loads_and_the_run_exported(finished_run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "model"
    assert "after step 4" in miles("export", str(finished_run), str(out)).stdout
    ours = AutoModelForCausalLM.from_pretrained(out).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(finished_run / "export").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    earlier = tmp_path / "earlier"
    miles("export", str(finished_run), str(earlier), "--step", "2")
    older = AutoModelForCausalLM.from_pretrained(earlier).state_dict()
    assert any(not torch.equal(ours[name], older[name]) for name in ours)


def test_export_never_overwrites_and_names_what_there_is(finished_run: Path, tmp_path: Path) -> None:
    done = miles("export", str(finished_run), str(tmp_path), check=False)
    assert done.returncode == 1
    assert "never overwrites" in done.stderr
    done = miles("export", str(finished_run), str(tmp_path / "x"), "--step", "3", check=False)
    assert "no checkpoint of step 3" in done.stderr


def test_eval_measures_what_the_run_measured(finished_run: Path) -> None:
    said = miles("eval", "examples/tiny.toml", "--model", str(finished_run / "export")).stdout
    store = RunDirectory.open(finished_run, write=False)
    from miles_core.runs.metrics import MetricsStore

    metrics = MetricsStore(store.metrics_file)
    (_, mean) = metrics.series("eval", "heldout/greedy/mean")[-1]
    metrics.close()
    assert f"heldout, greedy: {mean:.3f}" in said


def test_resume_of_a_finished_run_changes_nothing(run_copy: Path) -> None:
    weights = (run_copy / "export" / "model.safetensors").read_bytes()
    ledger = audit_run(RunDirectory.open(run_copy, write=False)).conservation
    miles("resume", str(run_copy), "--quiet")
    assert (run_copy / "export" / "model.safetensors").read_bytes() == weights
    after = audit_run(RunDirectory.open(run_copy, write=False))
    assert after.conservation == ledger
    assert after.hard_mismatches == 0


def test_runs_list_and_report_and_compare(finished_run: Path, tmp_path: Path) -> None:
    assert "finished" in miles("runs", "list", str(finished_run.parent)).stdout
    assert "no run directory" in miles("runs", "list", str(tmp_path)).stdout
    out = tmp_path / "page.html"
    assert str(out) in miles("report", str(finished_run), "--out", str(out)).stdout
    assert "held-out heldout/sampled" in miles("compare", str(finished_run)).stdout


def test_config_show_tells_origins(tmp_path: Path) -> None:
    said = miles("config", "show", "examples/tiny.toml", "--set", "run.seed=5").stdout
    rows = {line.split()[0]: line for line in said.splitlines()}
    assert "examples/tiny.toml:" in rows["run.steps"]
    assert "--set run.seed=5" in rows["run.seed"]
    assert "default" in rows["model.dtype"]


def test_config_schema_accepts_good_and_refuses_bad() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import json
    import tomllib

    schema = json.loads(miles("config", "schema").stdout)
    good = tomllib.loads((ROOT / "examples" / "tiny.toml").read_text())
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "reward": {"use": "exact", "nonsense": 1}}, schema)


@pytest.mark.slow
def test_the_asynchronous_mode_is_exact_and_within_its_bound(tmp_path: Path) -> None:
    path = train(
        tmp_path, "async", "schedule.mode=async", "schedule.max_running=64", "schedule.max_staleness=1", "run.steps=6"
    )
    result = audit_run(RunDirectory.open(path, write=False))
    assert result.hard_mismatches == 0
    assert result.conservation.trained == 6 * 8
    assert max(result.staleness) <= 1
