"""`miles sync bench`: what each installed transport does on this host; also what `transport = "auto"` decides from."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from miles_core.errors import ConfigError, PublishError

if TYPE_CHECKING:
    from miles_core.config.load import LoadedConfig
    from miles_core.plugins import PluginManager

__all__ = ["candidates", "resolved_transport", "sync"]

_MEASURE_SECONDS = 120.0


@click.group()
def sync() -> None:
    """Publishing weights on this host."""


@sync.command()
@click.option("--megabytes", type=click.IntRange(min=1), default=64, show_default=True, help="MB of weights.")
@click.option("--engines", type=click.IntRange(min=1), default=1, show_default=True, help="Engines on this host.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Publishes; the best counts.")
@click.option("--transport", "names", multiple=True, help="Only this one; may be repeated, as NAME or as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def bench(megabytes: int, engines: int, repeats: int, names: tuple[str, ...], as_json: bool) -> None:
    """Publish to engines without a model, by every installed transport; memcpy and a plain broadcast beside."""
    from miles_core.plugins import PluginManager
    from miles_core.testing.measuring import measure, plain_rates

    plugins = PluginManager.discover()
    chosen = [_named(name) for name in names or plugins.names("miles_weight_transports") if name != "auto"]
    nbytes = megabytes * 1_000_000
    rows = [measure(plugins, use, settings, nbytes, engines, repeats) for use, settings in chosen]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    click.echo(f"{megabytes} MB to {engines} engine(s), best of {repeats}; GB/s are summed over engines")
    click.echo(f"{'':<18}{'GB/s':>8}{'seconds':>10}{'paused':>10}{'checksums':>11}")
    for what, seconds in plain_rates(nbytes, engines, repeats).items():
        click.echo(f"{what:<18}{nbytes * engines / seconds / 1e9:>8.2f}{seconds:>10.3f}")
    for row in rows:
        if row.failure:
            click.echo(f"{row.transport:<18}{row.failure}")
        else:
            click.echo(
                f"{row.transport:<18}{row.rate:>8.2f}{row.seconds:>10.3f}{row.paused_seconds:>10.3f}"
                f"{row.verify_share:>10.0%}"
            )


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """A transport and its settings: `p2p`, or `{"use": "p2p", "library": "nixl"}`."""
    settings = json.loads(text) if text.startswith("{") else {"use": text}
    return settings.pop("use"), settings


def candidates(loaded: LoadedConfig, plugins: PluginManager) -> tuple[list[str], dict[str, str]]:
    """Installed transports that the config allows, and the others with the reason, without measuring."""
    from miles_core.config.load import loaded_from_tree
    from miles_core.config.preflight import preflight

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
    from miles_core.config.load import loaded_from_tree
    from miles_core.errors import Problem
    from miles_core.sync.auto import AutoConfig, Measurement, choose

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
        raise PublishError(f"measuring transports took longer than {_MEASURE_SECONDS:.0f} s; name one") from error
    if done.returncode:
        raise PublishError(f"measuring transports failed: {done.stderr[-500:]}")
    rows: list[dict[str, Any]] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("[{"))
    )  # libraries print too
    return rows
