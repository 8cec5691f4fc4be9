"""`miles export`."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.cli.options import run_argument

__all__ = ["export"]


@click.command()
@run_argument
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint to export; without it, the newest.")
def export(run: Path, out: Path, step: int | None) -> None:
    """Write a run's model as a Hugging Face directory that transformers loads."""
    from miles_core.runs.exporting import export_run

    directory, taken = export_run(run, out, step=step)
    click.echo(f"wrote the model after step {taken} to {directory}")
