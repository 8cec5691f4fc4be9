"""`miles families list | verify | probe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from miles_core.contracts.families import ModelFamily
    from miles_core.data.tokenizer import FileTokenizer
    from miles_core.tito.live import LiveVerdict
    from miles_core.tito.official import OfficialTemplate

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
@click.option(
    "--template",
    metavar="FILE",
    help="Official chat template to compare with: a .jinja file, or `default`, the tokenizer directory's own.",
)
@click.option(
    "--template-argument", "arguments", multiple=True, metavar="KEY=JSON", help="Variable of the template; repeatable."
)
@click.option("--engine", metavar="URL", help="Hold the conversations with this engine instead.")
@click.option("--max-new-tokens", default=256, show_default=True, help="Of one reply of the engine.")
def verify(
    name: str,
    tokenizer: Path,
    options: tuple[str, ...],
    count: int,
    seed: int,
    template: str | None,
    arguments: tuple[str, ...],
    engine: str | None,
    max_new_tokens: int,
) -> None:
    """Prove on generated conversations that a family is append-only and that parsing inverts rendering; with a live
    engine, on ids that it sampled. Exit status 1 when a law is broken."""
    from miles_core.cli.serve import family_settings
    from miles_core.contracts.families import ModelFamily
    from miles_core.data.tokenizer import load_tokenizer
    from miles_core.plugins import PluginManager
    from miles_core.tito.verify import Verdict
    from miles_core.tito.verify import verify as prove

    loaded = load_tokenizer(tokenizer)
    family = PluginManager.discover().create("miles_model_families", name, family_settings(options), ModelFamily)
    verdict: Verdict
    if engine is not None:
        from miles_core.eventloop import run

        live = run(_verify_live(family, loaded, engine, count, seed, max_new_tokens))
        click.echo(
            f"{name}: {live.conversations} conversations with {engine}, {live.replies} replies, {live.tokens} tokens "
            f"sampled; {live.unfinished} replies ended at their limit, {live.respelled} are rendered with other ids"
        )
        verdict = live
    else:
        official = None if template is None else _official(template, loaded, family_settings(arguments))
        special = sorted(loaded.special_names)
        verdict = prove(family, loaded, count=count, seed=seed, special=special, official=official, compare=count)
        click.echo(
            f"{name}: {verdict.conversations} conversations, {verdict.refused} refused; {verdict.replies} replies with "
            f"{verdict.calls} tool calls and {verdict.malformed} malformed ones"
        )
        if official is not None:
            click.echo(f"{verdict.compared} more conversations are append-only in {template}")
    for finding in verdict.findings:
        times = verdict.broken.get(finding.law, verdict.refused)
        click.echo(f"{finding.law}: {times} times, first: {finding.detail}\n  {finding.messages}")
    if verdict.broken:
        raise SystemExit(1)
    click.echo("append-only, parse inverts render, streams and junctions: no law is broken")


def _official(template: str, tokenizer: FileTokenizer, arguments: dict[str, Any]) -> OfficialTemplate:
    from miles_core.tito.official import OfficialTemplate

    if template != "default":
        return OfficialTemplate(Path(template).read_text(encoding="utf-8"), template, arguments)
    if tokenizer.chat_template is None:
        raise click.UsageError(f"{tokenizer.source}: its directory has no chat template; name a .jinja file")
    return OfficialTemplate(tokenizer.chat_template, tokenizer.source, arguments)


async def _verify_live(
    family: ModelFamily[Any], tokenizer: FileTokenizer, url: str, count: int, seed: int, max_new_tokens: int
) -> LiveVerdict:
    from miles_core.engines.pool import EnginePool
    from miles_core.tito.live import verify_live

    pool = EnginePool([url])
    try:
        special = sorted(tokenizer.special_names)
        return await verify_live(
            family, tokenizer, pool, count=count, seed=seed, special=special, max_new_tokens=max_new_tokens
        )
    finally:
        await pool.close()


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
