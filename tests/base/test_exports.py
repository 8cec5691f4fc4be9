"""Every public name exists, and what a module exports is sorted so that a reader finds it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import miles_core

ROOT = Path(miles_core.__file__).parent
MODULES = [m.name for m in pkgutil.walk_packages([str(ROOT)], "miles_core.") if not m.name.endswith("__main__")]
TORCH = ("miles_core.engines.embedded", "miles_core.models", "miles_core.objective", "miles_core.training")


def test_top_level_names_resolve() -> None:
    for name in miles_core.__all__:
        assert getattr(miles_core, name) is not None


def test_unknown_top_level_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = miles_core.nothing


@pytest.mark.parametrize("name", [m for m in MODULES if not m.startswith(TORCH)])
def test_module_exports_what_it_says(name: str) -> None:
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", ()):
        assert hasattr(module, exported), f"{name}.__all__ names {exported!r}"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        p for p in ROOT.rglob("*.py") if not re.match(r'^(#.*\n)*\s*"""', p.read_text()) and p.read_text().strip()
    ]
    assert not silent
