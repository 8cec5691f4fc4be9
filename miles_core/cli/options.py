"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["config_argument", "overrides_option", "run_argument"]

F = TypeVar("F", bound=Callable[..., Any])


def config_argument(function: F) -> F:
    """The run config, a TOML file."""
    return click.argument("config", type=click.Path(path_type=Path))(function)


def run_argument(function: F) -> F:
    """A run directory."""
    return click.argument("run", type=click.Path(path_type=Path))(function)


def overrides_option(function: F) -> F:
    """`--set a.b=c`, repeatable."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key of the config; repeatable."
    )(function)
