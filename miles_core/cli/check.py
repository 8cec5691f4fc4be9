"""`miles check`."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.cli.options import config_argument, overrides_option

__all__ = ["check"]


@click.command()
@config_argument
@overrides_option
@click.option("--data", is_flag=True, help="Read every row instead of a sample.")
def check(config: Path, overrides: tuple[str, ...], data: bool) -> None:
    """Explain everything wrong with a config, before anything starts. Exit status 2 when there is a problem."""
    from miles_core.config.load import load_config
    from miles_core.config.preflight import preflight
    from miles_core.errors import ConfigError
    from miles_core.plugins import PluginManager

    loaded = load_config(config, overrides)
    plugins = PluginManager.discover(enable=loaded.config.plugins.enable)
    report = preflight(loaded, plugins)
    for note in report.notes:
        click.echo(f"note: {note}")
    report.raise_problems()
    if loaded.config.transport.use == "auto":
        from miles_core.runs.transport_choice import candidates

        allowed, refused = candidates(loaded, plugins)
        click.echo(f"transport = auto: {', '.join(allowed) or 'none'} will be measured at start")
        for name, reason in refused.items():
            click.echo(f"transport = auto: not {name}, which {reason}")
    from miles_core.runs.memory import describe_memory
    from miles_core.runs.samples import check_samples

    problems = check_samples(loaded, plugins, every_row=data)
    if problems:
        raise ConfigError(problems)
    click.echo(f"{config}: no problem found")
    for line in describe_memory(loaded.config):
        click.echo(line)
