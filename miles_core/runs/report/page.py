"""Builds the page from what is on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from miles_core.config.origins import flatten
from miles_core.data.parquet import read_rollouts
from miles_core.data.tokenizer import load_tokenizer
from miles_core.models.reference import resolve_model
from miles_core.rollout.ledger import Ledger
from miles_core.runs.atomic import write_atomic
from miles_core.runs.audit import audit_run
from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore
from miles_core.runs.report.charts import Point, bars, curve, timeline
from miles_core.runs.report.reading import Reading, read_trajectory

__all__ = ["evaluation_rows", "write_report"]

_SHOWN_EACH = 6
_CURVES = (
    ("train", "loss", "loss"),
    ("train", "grad_norm", "gradient norm"),
    ("train", "entropy", "entropy of the policy"),
    ("train", "fidelity/abs_difference_mean", "train/rollout |Δ log-prob|, mean"),
    ("train", "fidelity/abs_difference_max", "train/rollout |Δ log-prob|, maximum"),
    ("rollout", "tokens/sampled_per_episode", "sampled tokens an episode"),
    ("rollout", "truncated", "share of truncated episodes"),
    ("rollout", "staleness/max", "largest staleness of a trained group"),
    ("rollout", "staleness/token_mean", "mean staleness of a trained token"),
    ("schedule", "trainer_idle_seconds", "seconds that the trainer waited for its batch"),
    ("schedule", "running_mean", "episodes that ran, on average"),
    ("schedule", "buffer_depth", "finished groups that a batch left in the buffer"),
    ("time", "engine/idle_seconds", "seconds in which engines had nothing to do"),
    ("time", "engine/prefix_hit_rate", "share of prompt tokens from the prefix cache"),
    ("publish", "seconds", "seconds to publish a version"),
)


def write_report(run: RunDirectory, out: Path | None = None) -> Path:
    """Write the page (`report.html` in the run directory by default) and return its path."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(
        loader=PackageLoader("miles_core.runs.report", "."), autoescape=select_autoescape(default=True)
    )
    path = run.path / "report.html" if out is None else out
    page = environment.get_template("page.html.jinja").render(_content(run))
    write_atomic(path, page.encode())
    return path


def _content(run: RunDirectory) -> dict[str, Any]:
    loaded = run.loaded_config()
    store = MetricsStore(run.metrics_file)
    ledger = Ledger(run.ledger_file)
    try:
        drops = dict(sorted(ledger.drops().items(), key=lambda item: -item[1]))
        charts, zero = _charts(store)
        spans = store.spans()
        headline = _headline(store)
        evaluations = evaluation_rows(store)
    finally:
        store.close()
        ledger.close()
    audit = audit_run(run)
    staleness = {str(age): float(n) for age, n in sorted(audit.staleness.items())}
    resolved = flatten(loaded.resolved())
    environment = orjson.loads((run.path / "environment.json").read_bytes())
    packages: dict[str, str] = environment.pop("packages")
    return {
        "name": run.path.name,
        "headline": headline,
        "evaluations": evaluations,
        "charts": charts,
        "zero": zero,
        "timeline": timeline(spans, title="what each part did, over wall-clock time"),
        "staleness": bars(staleness, title="trained tokens by staleness in versions"),
        "drops": bars({k: float(v) for k, v in drops.items()}, title="dropped groups by reason"),
        "audit": audit,
        "readings": _readings(run, loaded.config.model.path),
        "config": [(key, orjson.dumps(value).decode(), loaded.origin(key)) for key, value in resolved.items()],
        "environment": {k: v if isinstance(v, str) else orjson.dumps(v).decode() for k, v in environment.items()},
        "packages": packages,
    }


def _headline(store: MetricsStore) -> list[dict[str, str]]:
    """Held-out numbers, first and last."""
    rows = []
    for name in store.names("eval"):
        if not name.endswith("/mean"):
            continue
        prefix = name.removesuffix("/mean")
        means, errors = store.series("eval", name), dict(store.series("eval", f"{prefix}/standard_error"))
        (first, before), (last, after) = means[0], means[-1]
        rows.append(
            {
                "name": prefix.replace("/", ", "),
                "before": f"{before:.3f} ± {errors[first]:.3f}",
                "after": f"{after:.3f} ± {errors[last]:.3f}",
                "change": f"{after - before:+.3f}",
            }
        )
    return rows


def evaluation_rows(store: MetricsStore) -> list[dict[str, Any]]:
    """What became of every evaluation, by version: `version`, `name`, `placement`, `outcome`, and as `result` the
    number, or the reason why there is none."""
    rows: list[dict[str, Any]] = []
    for found in store.evaluations():
        if not found.dataset and found.outcome == "measured":
            continue  # its data sets tell
        row = {"version": found.version, "placement": found.placement, "outcome": found.outcome}
        if found.dataset:
            prefix = f"{found.dataset}/{found.mode}"
            mean, error = (dict(store.series("eval", f"{prefix}/{n}")) for n in ("mean", "standard_error"))
            result = f"{mean[found.version]:.3f} ± {error[found.version]:.3f}" if found.version in mean else ""
            rows.append({**row, "name": f"{found.dataset}, {found.mode}", "result": result})
        else:
            rows.append({**row, "name": "all data sets", "result": found.reason})
    return rows


def _charts(store: MetricsStore) -> tuple[list[tuple[str, str]], list[str]]:
    """Titles and charts, and the titles of those that would be a line at zero."""
    charts, zero = [], []
    held_out: dict[str, list[Point]] = {}
    for name in store.names("eval"):
        if name.endswith("/mean"):
            prefix = name.removesuffix("/mean")
            errors = dict(store.series("eval", f"{prefix}/standard_error"))
            held_out[prefix.replace("/", ", ")] = [(s, v, errors[s]) for s, v in store.series("eval", name)]
    charts.append(("held-out reward ± standard error", curve(held_out, title="held-out reward", x_label="version")))
    spread = dict(store.series("rollout", "reward/std"))
    episodes = dict(store.series("rollout", "episodes"))
    reward: list[Point] = [
        (s, v, spread[s] / max(episodes[s], 1.0) ** 0.5) for s, v in store.series("rollout", "reward/mean")
    ]
    charts.append(("reward of training batches ± standard error", curve({"reward": reward}, title="reward")))
    for kind, name, title in _CURVES:
        series = [(float(s), v, 0.0) for s, v in store.series(kind, name)]
        if series and not any(value for _, value, _ in series):
            zero.append(title)
        else:
            charts.append((title, curve({title: series}, title=title)))
    return [(title, chart) for title, chart in charts if chart], zero


def _readings(run: RunDirectory, model: str) -> list[tuple[str, list[Reading]]]:
    """The first trajectories of the first and the last batch."""
    files = sorted((run.path / "rollouts").glob("step-*.parquet"))
    if not files:
        return []
    tokenizer = load_tokenizer(resolve_model(model).directory)
    return [
        (path.stem.replace("-", " "), [read_trajectory(t, tokenizer) for t in read_rollouts(path)[:_SHOWN_EACH]])
        for path in dict.fromkeys((files[0], files[-1]))
    ]
