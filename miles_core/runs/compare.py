"""Runs side by side: runs whose configs differ in name, place and seed alone are replicates of one setting.

Two settings are compared by Welch's t-test on the last held-out mean. The spread of a setting with several seeds is
that between its seeds; a single run has only its standard error over prompts, and the table says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from miles_core.config.origins import flatten
from miles_core.errors import RunDirectoryError
from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore

__all__ = ["Setting", "compare_runs", "two_sided_p", "welch"]

_NOT_A_SETTING = ("run.name", "run.directory", "run.seed", "run.export", "run.keep_checkpoints")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Replicates of one setting: per run the last held-out mean by data set, and its standard error over prompts."""

    label: str
    runs: tuple[str, ...]
    config: dict[str, Any]
    means: dict[str, list[float]]
    errors: dict[str, list[float]]

    def estimate(self, name: str) -> tuple[float, float, float]:
        """(mean, standard error, degrees of freedom) of a data set."""
        values = self.means[name]
        mean = sum(values) / len(values)
        if len(values) == 1:
            return mean, self.errors[name][0], math.inf
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
        return mean, math.sqrt(variance / len(values)), len(values) - 1.0


def compare_runs(paths: Sequence[Path]) -> str:
    """The comparison as text. Raises `RunDirectoryError` when a run has no held-out evaluation."""
    settings = _settings([RunDirectory.open(path, write=False) for path in paths])
    lines = []
    for setting in settings:
        seeds = "1 run" if len(setting.runs) == 1 else f"{len(setting.runs)} replicates"
        lines.append(f"{setting.label}  ({seeds}: {', '.join(setting.runs)})")
        for name in setting.means:
            mean, error, _ = setting.estimate(name)
            source = "over prompts" if len(setting.runs) == 1 else "between seeds"
            lines.append(f"    held-out {name}: {mean:.4f} ± {error:.4f} ({source})")
    for one, other in itertools.combinations(settings, 2):
        lines.append(f"\n{one.label} against {other.label}")
        lines += [f"    {difference}" for difference in _config_differences(one, other)]
        for name in one.means.keys() & other.means.keys():
            lines.append("    " + _verdict(name, one, other))
    return "\n".join(lines)


def _settings(runs: Sequence[RunDirectory]) -> list[Setting]:
    grouped: dict[bytes, list[RunDirectory]] = {}
    configs: dict[bytes, dict[str, Any]] = {}
    for run in runs:
        flat = flatten(run.loaded_config().resolved())
        config = {k: v for k, v in flat.items() if k not in _NOT_A_SETTING}
        key = orjson.dumps(config, option=orjson.OPT_SORT_KEYS)
        grouped.setdefault(key, []).append(run)
        configs[key] = config
    return [
        _setting(chr(ord("A") + index), members, configs[key]) for index, (key, members) in enumerate(grouped.items())
    ]


def _setting(label: str, runs: Sequence[RunDirectory], config: dict[str, Any]) -> Setting:
    means: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for run in runs:
        store = MetricsStore(run.metrics_file)
        try:
            names = [n.removesuffix("/mean") for n in store.names("eval") if n.endswith("/mean")]
            if not names:
                raise RunDirectoryError(
                    f"{run.path} has no held-out evaluation to compare by; add [[evaluation.datasets]]"
                )
            for name in names:
                means.setdefault(name, []).append(store.series("eval", f"{name}/mean")[-1][1])
                errors.setdefault(name, []).append(store.series("eval", f"{name}/standard_error")[-1][1])
        finally:
            store.close()
    return Setting(label=label, runs=tuple(r.path.name for r in runs), config=config, means=means, errors=errors)


def _config_differences(one: Setting, other: Setting) -> list[str]:
    keys = sorted(one.config.keys() | other.config.keys())
    return [
        f"{key}: {one.config.get(key)!r} against {other.config.get(key)!r}"
        for key in keys
        if one.config.get(key) != other.config.get(key)
    ]


def _verdict(name: str, one: Setting, other: Setting) -> str:
    first, second = one.estimate(name), other.estimate(name)
    difference, error, freedom = welch(first, second)
    if error == 0:
        return f"held-out {name}: {difference:+.4f}, without any spread to judge it by"
    p = two_sided_p(difference / error, freedom)
    word = "significant" if p < 0.05 else "not significant"
    caution = "" if len(one.runs) > 1 and len(other.runs) > 1 else "; one run a setting says nothing about seeds"
    return f"held-out {name}: {difference:+.4f} ± {error:.4f}, p = {p:.3g}: {word} at 5 %{caution}"


def welch(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    """(difference, standard error, degrees of freedom by Welch–Satterthwaite) of two (mean, error, freedom)."""
    difference = other[0] - one[0]
    first, second = one[1] ** 2, other[1] ** 2
    error = math.sqrt(first + second)
    spread = first**2 / one[2] + second**2 / other[2]
    return difference, error, (first + second) ** 2 / spread if spread else math.inf


def two_sided_p(t: float, freedom: float) -> float:
    """P(|T| ≥ |t|) for Student's t. With x = √ν·tan θ the density is cos^(ν−1) θ up to a constant, so that the tail
    is a ratio of two smooth integrals over a finite interval.

    >>> round(two_sided_p(2.776445, 4), 4)
    0.05
    """
    if math.isinf(freedom):
        return math.erfc(abs(t) / math.sqrt(2))
    nodes, weights = np.polynomial.legendre.leggauss(200)

    def integral(low: float, high: float) -> float:
        theta = (high - low) / 2 * nodes + (high + low) / 2
        return float((high - low) / 2 * (weights * np.cos(theta) ** (freedom - 1)).sum())

    start = math.atan(abs(t) / math.sqrt(freedom))
    return integral(start, math.pi / 2) / integral(0.0, math.pi / 2)
