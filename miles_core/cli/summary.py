"""What a finished run prints: what was gained, where things are, what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.run import RunConfig
    from miles_core.runs.directory import RunDirectory
    from miles_core.runs.loop import RunResult
    from miles_core.runs.metrics import MetricsStore

__all__ = ["summarize"]


def summarize(config: RunConfig, directory: RunDirectory, result: RunResult) -> str:
    """The summary in words, from the metrics on disk (so that a resumed run tells the whole story)."""
    from miles_core.runs.metrics import MetricsStore as Store
    from miles_core.runs.report.page import write_report

    store = Store(directory.metrics_file)
    try:
        lines = [_gain(store, prefix) for prefix in _prefixes(store)]
    finally:
        store.close()
    report = write_report(directory)
    path = directory.path
    lines = [
        "",
        f"Trained {result.steps} steps in {result.seconds:.0f} s.",
        *lines,
        "",
        f"Run directory   {path}",
        *([f"Exported model  {directory.export_directory}"] if config.run.export else []),
        f"Report          {report}",
        "",
        "Next:",
        f"  open {report} in a browser: curves, timeline, trajectories to read",
        f"  miles audit {path}        prove that what was trained is what was sampled",
        f"  miles compare {path} …    put runs with other seeds or settings beside it",
    ]
    return "\n".join(lines)


def _prefixes(store: MetricsStore) -> list[str]:
    return [name.removesuffix("/mean") for name in store.names("eval") if name.endswith("/mean")]


def _gain(store: MetricsStore, prefix: str) -> str:
    """Held-out accuracy before and after, with standard errors and the difference in their units."""
    means = store.series("eval", f"{prefix}/mean")
    errors = dict(store.series("eval", f"{prefix}/standard_error"))
    prompts = dict(store.series("eval", f"{prefix}/prompts"))
    name = prefix.replace("/", ", ")
    (first, before), (last, after) = means[0], means[-1]
    count = int(prompts[last])
    if first == last:
        return f"Held-out {name}: {before:.3f} ± {errors[first]:.3f} on {count} prompts."
    spread = (errors[first] ** 2 + errors[last] ** 2) ** 0.5
    times = f", {(after - before) / spread:+.1f} standard errors" if spread else ""
    return (
        f"Held-out {name}: {before:.3f} ± {errors[first]:.3f} before, {after:.3f} ± {errors[last]:.3f} after "
        f"({after - before:+.3f}{times}) on {count} prompts."
    )
