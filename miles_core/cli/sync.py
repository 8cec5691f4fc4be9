"""`miles sync bench`: what each installed transport does on this host."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

__all__ = ["sync"]


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
