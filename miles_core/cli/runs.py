"""`miles runs list`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["runs"]


@click.group()
def runs() -> None:
    """List runs."""


@runs.command("list")
@click.argument("directory", type=click.Path(path_type=Path), default=Path("runs"))
def list_runs(directory: Path) -> None:
    """List the runs in DIRECTORY (default: runs) with their progress and last reward."""
    from rich.console import Console
    from rich.table import Table

    from miles_core.runs.listing import describe_runs

    rows = describe_runs(directory)
    if not rows:
        click.echo(f"no run directory in {directory}")
        return
    table = Table("run", "steps", "reward", "state", "checkpoint")
    for row in rows:
        table.add_row(row.name, f"{row.step}/{row.steps}", row.reward, row.state, row.checkpoint)
    Console().print(table)
