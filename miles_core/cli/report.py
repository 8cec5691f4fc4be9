"""`miles report`."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.cli.options import run_argument

__all__ = ["report"]


@click.command()
@run_argument
@click.option("--out", type=click.Path(path_type=Path), help="File to write; without it, report.html in the run.")
def report(run: Path, out: Path | None) -> None:
    """Write a run's report as one HTML page without outside resources."""
    from miles_core.runs.directory import RunDirectory
    from miles_core.runs.report.page import write_report

    click.echo(str(write_report(RunDirectory.open(run, write=False), out)))
