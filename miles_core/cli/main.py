"""Entry point of `miles`. Commands are listed here and imported only when they run, so that `miles --help` is quick."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from miles_core.errors import ConfigError, MilesError

__all__ = ["main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("miles_core.cli.train:train", "Run a training run from a config file."),
    "resume": ("miles_core.cli.train:resume", "Continue a run from its last checkpoint."),
    "check": ("miles_core.cli.check:check", "Explain everything wrong with a config, before anything starts."),
    "eval": ("miles_core.cli.evaluate:evaluate", "Measure a model on the held-out data of a config."),
    "export": ("miles_core.cli.export:export", "Write a run's model as a Hugging Face directory."),
    "report": ("miles_core.cli.report:report", "Write a run's report as one HTML page."),
    "compare": ("miles_core.cli.compare:compare", "Put runs side by side, seeds as replicates."),
    "audit": ("miles_core.cli.audit:audit", "Prove that what was trained is what was sampled."),
    "runs": ("miles_core.cli.runs:runs", "List runs."),
    "config": ("miles_core.cli.config:config", "Show a resolved config with origins, or its JSON Schema."),
    "serve": ("miles_core.cli.serve:serve", "Serve sessions over an engine, by themselves."),
    "families": ("miles_core.cli.families:families", "List model families, and prove what they render."),
    "plugins": ("miles_core.cli.plugins:plugins", "List, show, check and create plugins."),
}


class _LazyGroup(click.Group):
    """A group whose commands are import strings; their help is known without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


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
