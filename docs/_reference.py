"""MkDocs hook: the reference pages, generated from the code when the site is built. They are never written to disk."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from miles_core import contracts, hookspecs
from miles_core.cli.main import COMMANDS, cli
from miles_core.config.run import RunConfig
from miles_core.contracts.component import Component, ComponentConfig
from miles_core.plugins import REGISTRATION_HOOKS, PluginManager
from miles_core.simulation.distributions import Distribution
from miles_core.simulation.scenario import Scenario
from miles_core.simulation.sync_scenario import SyncScenario
from miles_core.testing.scaffold import plugin_files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Markdown of every reference page, by name."""
    return {
        "config": _config(),
        "components": _components(),
        "simulation": _scenario(),
        "sync-simulation": _sync_scenario(),
        "hooks": _hooks(),
        "contracts": _contracts(),
        "cli": _commands(),
        "kinds": _kinds(),
    }


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            value = value.value if isinstance(value, Distribution) else value
            default = "its own defaults" if isinstance(value, BaseModel) else f"`{value!r}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(rows) if len(rows) > 2 else "It has no keys."


def _sections(model: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    found = []
    for name, field in model.model_fields.items():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found.append((name, candidate))
    return found


def _scenario() -> str:
    lines = [
        "# Scenario keys",
        "",
        "What [`miles simulate schedule`](../simulation.md) reads. `[schedule]` is that of "
        "[a run config](config.md). A key whose values are drawn takes a number or a distribution.",
    ]
    for name, model in _sections(Scenario):
        if name != "schedule":
            lines += ["", f"## `[{name}]`", "", inspect.cleandoc(model.__doc__ or ""), "", _table(model)]
    lines += ["", "## Distributions", "", inspect.cleandoc(Distribution.__doc__ or ""), "", _table(Distribution)]
    return "\n".join(lines)


def _sync_scenario() -> str:
    lines = [
        "# Publishing scenario keys",
        "",
        "What [`miles simulate sync`](../publishing-model.md) reads: `[model]` or `[weights]`, and the others.",
    ]
    for name, model in _sections(SyncScenario):
        lines += ["", f"## `[{name}]`", "", inspect.cleandoc(model.__doc__ or ""), "", _table(model)]
    return "\n".join(lines)


def _config() -> str:
    lines = [
        "# Config keys",
        "",
        "A run is one TOML file. `miles config show run.toml` prints every key with its value and origin; "
        "`miles config schema` prints a JSON Schema for editors. A section that chooses a component holds `use` and "
        "the [component's own keys](components.md).",
        "",
        _table(RunConfig),
    ]
    for name, model in _sections(RunConfig):
        lines += ["", f"## `[{name}]`", "", inspect.cleandoc(model.__doc__ or ""), "", _table(model)]
        for inner, nested in _sections(model):
            if not issubclass(nested, ComponentConfig) and nested.__name__ == "EvaluationDataset":
                title = f"### `[[{name}.{inner}]]`"
                lines += ["", title, "", inspect.cleandoc(nested.__doc__ or ""), "", _table(nested)]
    return "\n".join(lines)


def _components() -> str:
    manager = PluginManager.discover(enable=["core"])
    lines = ["# Components", "", "What the core registers, through the same hooks as everybody."]
    for hook in REGISTRATION_HOOKS:
        registrations = manager.registrations(hook)
        if not registrations:
            continue
        lines += ["", f"## {hook.removeprefix('miles_').replace('_', ' ').capitalize()}"]
        for registration in registrations:
            component: type[Component[Any]] = registration.component
            lines += ["", f"### `{registration.name}`", "", inspect.cleandoc(component.__doc__ or "")]
            lines += ["", _table(component.Config)]
            for requirement in component.requires:
                lines += ["", f"Needs `{requirement.key}`: {requirement.reason}."]
            for conflict in component.conflicts:
                values = ", ".join(f"`{v}`" for v in conflict.values)
                lines += ["", f"Cannot go with `{conflict.key}` = {values}: {conflict.reason}."]
    return "\n".join(lines)


def _hooks() -> str:
    lines = ["# Hooks", "", inspect.cleandoc(hookspecs.__doc__ or "")]
    for name, function in vars(hookspecs).items():
        if name.startswith("miles_"):
            signature = str(inspect.signature(function)).replace("'", "")
            doc = inspect.cleandoc(function.__doc__ or "")
            lines += ["", f"## `{name}`", "", "```text", f"{name}{signature}", "```", "", doc]
    return "\n".join(lines)


def _contracts() -> str:
    lines = ["# Contracts", "", "What plugin authors subclass, and the records that pass between components."]
    for info in sorted(pkgutil.iter_modules(contracts.__path__), key=lambda i: i.name):
        module = importlib.import_module(f"miles_core.contracts.{info.name}")
        lines += ["", f"## `miles_core.contracts.{info.name}`", "", inspect.cleandoc(module.__doc__ or "")]
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.isclass(value):
                continue
            lines += ["", f"### `{name}`", "", inspect.cleandoc(value.__doc__ or "")]
            for method_name, method in vars(value).items():
                public = not method_name.startswith("_") and inspect.isfunction(method)
                if public and method.__doc__:
                    signature = str(inspect.signature(method)).replace("'", "")
                    prefix = "async " if inspect.iscoroutinefunction(method) else ""
                    lines += [
                        "",
                        "```text",
                        f"{prefix}{method_name}{signature}",
                        "```",
                        "",
                        inspect.cleandoc(method.__doc__),
                    ]
    return "\n".join(lines)


def _kinds() -> str:
    lines = [
        "# A plugin of each kind",
        "",
        "`miles plugins new KIND NAME` writes these, each in a whole distribution with entry point, tests and README. "
        "They are generated, installed and tested in continuous integration.",
    ]
    for hook in REGISTRATION_HOOKS:
        kind = hook.removeprefix("miles_")
        files = plugin_files(kind, "example", "example")
        code = files["miles_example/component.py"]
        lines += ["", f"## {kind.replace('_', ' ').capitalize()}", "", f"`miles plugins new {kind} example`"]
        lines += ["", "```py", code.rstrip(), "```"]
    return "\n".join(lines)


def _commands() -> str:
    lines = ["# Commands", "", "`miles --help` lists them."]
    context = click.Context(cli, info_name="miles")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        lines += _command(command, f"miles {name}", context)
    return "\n".join(lines)


def _command(command: click.Command, path: str, parent: click.Context) -> list[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    lines = ["", f"## `{path}`", "", "```text", command.get_help(context), "```"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            lines += _command(inner, f"{path} {name}", context)
    return lines
