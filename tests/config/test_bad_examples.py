"""Every config in examples/bad is refused with the message that its first lines promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.config.load import load_config
from miles_core.config.preflight import preflight
from miles_core.errors import ConfigError, MilesError
from miles_core.plugins import PluginManager
from miles_core.runs.samples import check_samples

ROOT = Path(__file__).parents[2]
BAD = sorted((ROOT / "examples" / "bad").glob("*.toml"))
NEEDS_MODEL = {"prompt_too_long", "no_such_data", "malformed_row", "missing_field", "no_such_reward_function"}
"""Found while sample rows are rendered and scored: that takes the tiny model's tokenizer, which torch builds."""


def expected(path: Path) -> list[str]:
    return [line.removeprefix("# expect: ") for line in path.read_text().splitlines() if line.startswith("# expect: ")]


def complaint(path: Path) -> str:
    """What `miles check --data` says of a config."""
    try:
        loaded = load_config(path)
        plugins = PluginManager.discover(enable=loaded.config.plugins.enable)
        preflight(loaded, plugins).raise_problems()
        problems = check_samples(loaded, plugins, every_row=True)
        if problems:
            raise ConfigError(problems)
    except MilesError as error:
        return str(error)
    return ""


def test_there_are_enough() -> None:
    assert len(BAD) >= 15


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_bad_config_is_refused_with_its_message(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem in NEEDS_MODEL:
        pytest.importorskip("torch")
    monkeypatch.chdir(ROOT)
    assert expected(path), "says what it expects"
    said = complaint(path)
    for part in expected(path):
        assert part in said


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.stem)
def test_good_config_has_no_problem(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load_config(path)
    if loaded.config.data.use == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    assert preflight(loaded, PluginManager.discover()).problems == ()


def test_the_command_exits_with_two_and_says_why() -> None:
    path = ROOT / "examples" / "bad" / "unknown_key.toml"
    command = [sys.executable, "-m", "miles_core.cli.main", "check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "did you mean 'steps'" in done.stderr
    assert "Traceback" not in done.stderr
