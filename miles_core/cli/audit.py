"""`miles audit`."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.cli.options import run_argument

__all__ = ["audit"]


@click.command()
@run_argument
def audit(run: Path) -> None:
    """Prove that what was trained is what was sampled. Exit status 1 when something differs."""
    from miles_core.runs.audit import audit_run
    from miles_core.runs.directory import RunDirectory

    result = audit_run(RunDirectory.open(run, write=False))
    click.echo(result.text)
    if result.hard_mismatches:
        raise SystemExit(1)
