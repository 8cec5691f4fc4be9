"""What `transport = "auto"` becomes: which installed transports a config allows, and the quickest of them here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from miles_core.config.load import LoadedConfig, loaded_from_tree
from miles_core.config.preflight import preflight
from miles_core.errors import ConfigError, Problem, PublishError
from miles_core.plugins import PluginManager
from miles_core.sync.auto import AutoConfig, Measurement, choose

__all__ = ["candidates", "resolved_transport"]

_MEASURE_SECONDS = 120.0


def candidates(loaded: LoadedConfig, plugins: PluginManager) -> tuple[list[str], dict[str, str]]:
    """Installed transports that the config allows, and the others with the reason, without measuring."""
    allowed, refused = [], {}
    tree = loaded.resolved()
    for name in plugins.names("miles_weight_transports"):
        if name == "auto":
            continue
        trial = loaded_from_tree({**tree, "transport": {"use": name}}, loaded.origins)
        problems = [p for p in preflight(trial, plugins).problems if p.key == "transport.use" or name in p.message]
        if problems:
            refused[name] = problems[0].message
        else:
            allowed.append(name)
    return allowed, refused


def resolved_transport(loaded: LoadedConfig, plugins: PluginManager) -> tuple[LoadedConfig, tuple[str, ...]]:
    """The config with a transport in the place of `auto`, and why that one. Any other config is returned as it is.
    Raises `ConfigError` when every transport is refused, `PublishError` when none works."""
    if loaded.config.transport.use != "auto":
        return loaded, ()
    allowed, refused = candidates(loaded, plugins)
    if not allowed:
        told = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ConfigError([Problem(key="transport.use", message=f"every transport is refused: {told}", origin="")])
    settings = AutoConfig.model_validate(loaded.config.transport.settings)
    measured = [Measurement(**row) for row in _measured_apart(allowed, settings.measure_mb)]
    choice = choose(measured, refused)
    tree = {**loaded.resolved(), "transport": {"use": choice.transport}}
    return loaded_from_tree(tree, loaded.origins), choice.reasons


def _measured_apart(names: Iterable[str], megabytes: int) -> list[dict[str, Any]]:
    """`miles sync bench` in a process of its own: libraries and threads of those not picked are gone with it."""
    command = [sys.executable, "-m", "miles_core.cli.main", "sync", "bench", "--json", "--megabytes", str(megabytes)]
    options = [word for name in names for word in ("--transport", name)]
    try:
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=_MEASURE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PublishError(
            f"measuring transports took longer than {_MEASURE_SECONDS:.0f} s; name one in [transport] use"
        ) from error
    if done.returncode:
        raise PublishError(
            f"measuring transports failed: {done.stderr[-500:]}\nTry `miles sync bench`, or name one in [transport] use"
        )
    rows: list[dict[str, Any]] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("[{"))
    )  # libraries print too
    return rows
