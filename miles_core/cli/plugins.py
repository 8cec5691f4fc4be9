"""`miles plugins list | show | check | new`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["plugins"]


@click.group()
def plugins() -> None:
    """List, show, check and create plugins."""


@plugins.command("list")
def list_plugins() -> None:
    """List plugins with distribution, version, hooks, components, load time, and what failed to load."""
    from rich.console import Console
    from rich.table import Table

    from miles_core.plugins import PluginManager

    manager = PluginManager.discover()
    table = Table("plugin", "distribution", "components", "load")
    for info in manager.plugins:
        offered: dict[str, list[str]] = {}
        for registration in manager.registrations():
            if registration.plugin == info.name:
                evidence = getattr(registration.component, "evidence", None)
                name = registration.name if evidence is None else f"{registration.name} ({evidence})"
                offered.setdefault(registration.hook.removeprefix("miles_"), []).append(name)
        events = [h for h in info.hooks if h.removeprefix("miles_") not in offered]
        lines = [f"{kind}: {', '.join(names)}" for kind, names in offered.items()]
        lines += [f"hooks: {', '.join(events)}"] if events else []
        distribution = f"{info.distribution} {info.version}".strip()
        table.add_row(info.name, distribution, "\n".join(lines), f"{1000 * info.load_seconds:.0f} ms")
    Console().print(table)
    for failure in manager.failures:
        click.echo(f"not loaded: {failure.message}", err=True)


@plugins.command()
@click.argument("name")
def show(name: str) -> None:
    """Show one plugin: each component with its documentation, keys, needs and limits."""
    from miles_core.errors import UnknownNameError, nearest
    from miles_core.plugins import PluginManager

    manager = PluginManager.discover()
    known = {info.name: info for info in manager.plugins}
    if name not in known:
        raise UnknownNameError(f"no plugin named {name!r}: {nearest(name, list(known))}")
    info = known[name]
    click.echo(f"{info.name}: {info.distribution} {info.version}")
    click.echo(f"hooks: {', '.join(info.hooks)}")
    for registration in manager.registrations():
        if registration.plugin != name:
            continue
        component = registration.component
        click.echo(f"\n{registration.hook.removeprefix('miles_')}: {registration.name}")
        click.echo(f"  {(component.__doc__ or '').strip().splitlines()[0] if component.__doc__ else ''}")
        for key, field in component.Config.model_fields.items():
            default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
            click.echo(f"  {key}: {' '.join((field.description or '').split())} ({default})")
        for requirement in component.requires:
            click.echo(f"  requires {requirement.key}: {requirement.reason}")
        for conflict in component.conflicts:
            click.echo(f"  conflicts with {conflict.key} in {list(conflict.values)}: {conflict.reason}")


@plugins.command()
@click.argument("name")
def check(name: str) -> None:
    """Run the conformance kit against an installed plugin. Exit status 1 when a check fails."""
    from miles_core.testing.runner import check_plugin

    results = check_plugin(name)
    for result in results:
        word = "FAIL" if result.error is not None else "skip" if result.skipped else "ok"
        click.echo(f"{word:4} {result.component}: {result.check}")
        if result.error or result.skipped:
            click.echo(f"     {result.error or result.skipped}", err=True)
    failed = sum(result.error is not None for result in results)
    skipped = sum(bool(result.skipped) for result in results)
    click.echo(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    if failed:
        raise SystemExit(1)


@plugins.command()
@click.argument("kind")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), default=Path(), help="Where to make it (default: here).")
def new(kind: str, name: str, into: Path) -> None:
    """Create a plugin distribution of a KIND (a registration hook without its prefix, such as rewards) called NAME."""
    from miles_core.testing.scaffold import create_plugin

    path = create_plugin(kind, name, into)
    click.echo(f"created {path}\n  python -m pip install -e {path}\n  pytest {path}")
