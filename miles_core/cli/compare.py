"""`miles compare`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["compare"]


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
def compare(runs: tuple[Path, ...]) -> None:
    """Put runs side by side. Runs that differ in their seed alone are replicates of one setting."""
    from miles_core.runs.compare import compare_runs

    click.echo(compare_runs(list(runs)))
