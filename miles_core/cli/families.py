"""`miles families list | verify | probe`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["families"]


@click.group()
def families() -> None:
    """List model families, and prove what they render."""


@families.command("list")
def list_families() -> None:
    """List the registered families with their evidence and their plugin."""
    from miles_core.plugins import PluginManager

    for registration in PluginManager.discover().registrations("miles_model_families"):
        summary = (registration.component.__doc__ or "").strip().splitlines()[:1]
        evidence = getattr(registration.component, "evidence", "unverified")
        click.echo(f"{registration.name}  ({evidence}, {registration.plugin})  {''.join(summary)}")


@families.command()
@click.argument("name")
@click.option("--tokenizer", required=True, type=click.Path(path_type=Path), help="Directory with the tokenizer.")
@click.option("--option", "options", multiple=True, metavar="KEY=JSON", help="Key of the family's section; repeatable.")
@click.option("--count", default=1000, show_default=True, help="Generated conversations to try.")
@click.option("--seed", default=0, show_default=True)
def verify(name: str, tokenizer: Path, options: tuple[str, ...], count: int, seed: int) -> None:
    """Prove on generated conversations that a family is append-only and that parsing inverts rendering. Exit status 1
    when a law is broken."""
    from miles_core.cli.serve import family_settings
    from miles_core.contracts.families import ModelFamily
    from miles_core.data.tokenizer import load_tokenizer
    from miles_core.plugins import PluginManager
    from miles_core.tito.verify import verify as prove

    loaded = load_tokenizer(tokenizer)
    family = PluginManager.discover().create("miles_model_families", name, family_settings(options), ModelFamily)
    verdict = prove(family, loaded, count=count, seed=seed, special=sorted(loaded.special_names))
    click.echo(f"{name}: {verdict.conversations} conversations, {verdict.refused} refused")
    for finding in verdict.findings:
        times = verdict.broken.get(finding.law, verdict.refused)
        click.echo(f"{finding.law}: {times} times, first: {finding.detail}\n  {finding.messages}")
    if verdict.broken:
        raise SystemExit(1)
    click.echo("append-only, parse inverts render, streams and junctions: no law is broken")


@families.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def probe(path: Path) -> None:
    """Say what a chat template does to history: PATH is a .jinja file, or a directory of them or of a tokenizer."""
    from rich.console import Console
    from rich.table import Table

    from miles_core.tito.probe import probe_template, templates_in

    table = Table("template", "append-only", "what breaks it")
    for name, source in templates_in(path):
        result = probe_template(source, name)
        table.add_row(name, result.word, result.detail)
    Console(soft_wrap=True).print(table)
