"""What was installed works as installed: entry points, versions in lockstep, and the core without the checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path

import importlib_metadata

import miles_core
from miles_core.plugins import ENTRY_POINT_GROUP, PluginManager

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(ROOT.glob("plugins/miles-*/pyproject.toml"))


def test_the_version_is_the_distributions() -> None:
    assert importlib_metadata.version("miles-core") == miles_core.__version__


def test_versions_move_in_lockstep() -> None:
    for path in PLUGINS:
        project = tomllib.loads(path.read_text())["project"]
        assert project["version"] == miles_core.__version__, path
        assert any(d.startswith("miles-core") for d in project["dependencies"]), path


def test_every_plugin_of_this_repository_that_is_installed_loads() -> None:
    manager = PluginManager.discover()
    ours = {tomllib.loads(p.read_text())["project"]["name"] for p in PLUGINS} | {"miles-core"}
    assert not [f.message for f in manager.failures if f.distribution in ours]
    installed = {e.name for e in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP) if e.dist.name in ours}
    assert installed <= {p.name for p in manager.plugins}


def test_the_package_is_typed_and_carries_its_templates() -> None:
    package = Path(miles_core.__file__).parent
    assert (package / "py.typed").exists()
    assert (package / "runs" / "report" / "page.html.jinja").exists()
