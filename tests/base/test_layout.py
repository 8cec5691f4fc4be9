"""What is written about the tree is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "miles_core"


def test_the_page_on_architecture_names_every_part_of_the_core_and_nothing_else():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = re.search(r"```text\nmiles_core/\n(.*?)```", text, re.DOTALL)
    assert layout is not None
    named = set(re.findall(r"(?:^|\s)([a-z_]+(?:/|\.py))(?=\s)", layout[1]))
    packages = {f"{path.parent.name}/" for path in CORE.glob("*/__init__.py")}
    modules = {path.name for path in CORE.glob("*.py") if path.name != "__init__.py"}
    assert named == packages | modules


def test_the_core_may_import_no_plugin_of_this_repository():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {rule["name"]: rule for rule in project["tool"]["importlinter"]["contracts"]}
    plugins = {path.parent.name.replace("-", "_") for path in ROOT.glob("plugins/miles-*/pyproject.toml")}
    assert set(contracts["The core never names a plugin"]["forbidden_modules"]) == plugins
