"""`miles train` and `miles resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_core.cli.options import config_argument, overrides_option, run_argument

if TYPE_CHECKING:
    from miles_core.config.load import LoadedConfig
    from miles_core.plugins import PluginManager
    from miles_core.runs.directory import RunDirectory

__all__ = ["resume", "train"]

_quiet = click.option("--quiet", is_flag=True, help="Print the summary only.")


@click.command()
@config_argument
@overrides_option
@_quiet
def train(config: Path, overrides: tuple[str, ...], quiet: bool) -> None:
    """Run a training run from a config file. The config is checked first; nothing starts while it has a problem."""
    from miles_core.config.load import load_config
    from miles_core.config.preflight import preflight
    from miles_core.errors import ConfigError
    from miles_core.plugins import PluginManager
    from miles_core.runs.directory import RunDirectory
    from miles_core.runs.samples import check_samples
    from miles_core.runs.transport_choice import resolved_transport

    loaded = load_config(config, overrides)
    plugins = PluginManager.discover(enable=loaded.config.plugins.enable)
    preflight(loaded, plugins).raise_problems()
    problems = check_samples(loaded, plugins, every_row=False)
    if problems:
        raise ConfigError(problems)
    loaded, reasons = resolved_transport(loaded, plugins)
    for reason in reasons:
        click.echo(f"transport: {reason}")
    path = loaded.config.run.directory / loaded.config.run.name
    _run(loaded, plugins, RunDirectory.create(path, loaded, plugins), quiet=quiet)


@click.command()
@run_argument
@_quiet
def resume(run: Path, quiet: bool) -> None:
    """Continue a run from its last checkpoint. In synchronous mode the result is that of the uninterrupted run."""
    from miles_core.plugins import PluginManager
    from miles_core.runs.directory import RunDirectory

    directory = RunDirectory.open(run, write=True)
    loaded = directory.loaded_config()
    plugins = PluginManager.discover(enable=loaded.config.plugins.enable)
    _run(loaded, plugins, directory, quiet=quiet)


def _run(loaded: LoadedConfig, plugins: PluginManager, directory: RunDirectory, *, quiet: bool) -> None:
    from miles_core.cli.panel import watch
    from miles_core.cli.summary import summarize
    from miles_core.errors import MilesError
    from miles_core.runs.loop import train as run_training

    try:
        with watch(loaded.config, quiet=quiet) as observer:
            result = run_training(loaded, plugins, directory, observer=observer)
    except MilesError as error:
        error.add_note(f"once that is mended, `miles resume {directory.path}` goes on from the last checkpoint")
        raise
    click.echo(summarize(loaded.config, directory, result))
