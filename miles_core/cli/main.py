"""Entry point of `miles`. Commands are listed here and imported only when they run, so that `miles --help` is quick."""

from __future__ import annotations

import sys
from importlib import import_module

import click
import importlib_metadata

from miles_core.errors import ConfigError, DuplicateNameError, MilesError, PluginLoadError

__all__ = ["COMMAND_GROUP", "main"]

COMMAND_GROUP = "miles.commands"
"""Entry points of commands that installed distributions add: the name, and the `click` command that it calls."""

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("miles_core.cli.train:train", "Run a training run from a config file."),
    "resume": ("miles_core.cli.train:resume", "Continue a run from its last checkpoint."),
    "check": ("miles_core.cli.check:check", "Explain everything wrong with a config, before anything starts."),
    "eval": ("miles_core.cli.evaluate:evaluate", "Measure a model on the held-out data of a config."),
    "export": ("miles_core.cli.export:export", "Write a run's model as a Hugging Face directory."),
    "report": ("miles_core.cli.report:report", "Write a run's report as one HTML page."),
    "compare": ("miles_core.cli.compare:compare", "Put runs side by side, seeds as replicates."),
    "audit": ("miles_core.cli.audit:audit", "Prove that what was trained is what was sampled."),
    "simulate": ("miles_core.cli.simulate:simulate", "Simulate a part of a run on a virtual clock."),
    "runs": ("miles_core.cli.runs:runs", "List runs."),
    "sync": ("miles_core.cli.sync:sync", "Measure publishing on this host."),
    "config": ("miles_core.cli.config:config", "Show a resolved config with origins, or its JSON Schema."),
    "serve": ("miles_core.cli.serve:serve", "Serve sessions over an engine, by themselves."),
    "families": ("miles_core.cli.families:families", "List model families, and prove what they render."),
    "plugins": ("miles_core.cli.plugins:plugins", "List, show, check and create plugins."),
}


def added_commands() -> dict[str, importlib_metadata.EntryPoint]:
    """Commands of installed distributions, by name, not imported yet. Raises `DuplicateNameError` for a name that is
    claimed twice, or is the core's."""
    found: dict[str, importlib_metadata.EntryPoint] = {}
    for entry in sorted(importlib_metadata.entry_points(group=COMMAND_GROUP), key=lambda e: e.name):
        previous = found.get(entry.name)
        if previous is not None and previous.value == entry.value:
            continue  # one distribution seen twice on sys.path
        if previous is not None or entry.name in COMMANDS:
            owner = "the core" if previous is None else _owner(previous)
            raise DuplicateNameError(
                f"`miles {entry.name}` is claimed by {owner} and by {_owner(entry)}; uninstall one of them"
            )
        found[entry.name] = entry
    return found


def _owner(entry: importlib_metadata.EntryPoint) -> str:
    return "(unknown distribution)" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _load(entry: importlib_metadata.EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except Exception as error:
        raise PluginLoadError(
            f"`miles {entry.name}` ({entry.value}) of {_owner(entry)} failed to load: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(command, click.Command):
        raise PluginLoadError(
            f"`miles {entry.name}` ({entry.value}) of {_owner(entry)} is {command!r}, no click command"
        )
    return command


class _LazyGroup(click.Group):
    """A group whose commands are import strings, or entry points; their help is known without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *added_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            entry = added_commands().get(cmd_name)
            return None if entry is None else _load(entry)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            rows = [(name, help_text) for name, (_, help_text) in COMMANDS.items()]
            rows += [(name, f"Added by {_owner(entry)}.") for name, entry in added_commands().items()]
            formatter.write_dl(rows)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="miles-core", prog_name="miles")
def cli() -> None:
    """Post-train language models with reinforcement learning: the trainer sees exactly what the policy sampled."""


def main() -> None:
    """Run a command. Exit status 2 for a bad config or bad arguments, 1 for a run that failed, 130 for Ctrl-C."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("interrupted; continue with `miles resume`", err=True)
        sys.exit(130)
    except ConfigError as error:
        click.echo(f"miles: {error}", err=True)
        sys.exit(2)
    except MilesError as error:
        click.echo(f"miles: {type(error).__name__}: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            click.echo(f"  {note}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
