"""`miles config show` and `miles config schema`."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.cli.options import config_argument, overrides_option

__all__ = ["config"]


@click.group()
def config() -> None:
    """Show a resolved config with origins, or its JSON Schema."""


@config.command()
@config_argument
@overrides_option
def show(config: Path, overrides: tuple[str, ...]) -> None:
    """Print every key with its value and where the value came from."""
    import orjson

    from miles_core.config.load import load_config
    from miles_core.config.origins import flatten

    loaded = load_config(config, overrides)
    rows = [(k, orjson.dumps(v).decode(), loaded.origin(k)) for k, v in flatten(loaded.resolved()).items()]
    width = max(len(k) for k, _, _ in rows)
    values = min(max(len(v) for _, v, _ in rows), 48)
    for key, value, origin in rows:
        click.echo(f"{key:<{width}}  {value:<{values}}  {origin}")


@config.command()
def schema() -> None:
    """Print the JSON Schema of a run config, with the sections of every installed component."""
    import orjson

    from miles_core.config.schema import config_schema
    from miles_core.plugins import PluginManager

    click.echo(orjson.dumps(config_schema(PluginManager.discover()), option=orjson.OPT_INDENT_2).decode())
