"""Every code block of README and docs does what it says: TOML loads, Python runs, commands exist with their options."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import click
import pytest

from miles_core.cli.main import cli
from miles_core.config.load import load_config, loaded_from_tree
from miles_core.config.preflight import preflight
from miles_core.plugins import PluginManager
from miles_core.simulation.scenario import scenario_of
from miles_core.simulation.sync_scenario import sync_scenario_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = {"my_rewards.py", "run.toml", "train.jsonl"}


def blocks(language: str) -> list[pytest.param]:  # type: ignore[valid-type]
    found = []
    for page in PAGES:
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text())):
            if kind == language:
                found.append(pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


def test_only_known_languages_are_used() -> None:
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text())}
    assert kinds <= {"toml", "python", "console", "json", "text"}


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_is_a_config_or_part_of_one(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tomllib.loads(text)
    if "project" in tree:
        assert "miles.plugins" in tree["project"]["entry-points"]
        return
    if "episodes" in tree:
        scenario_of(tree, {}, read=False)
        return
    if "engines" in tree:
        sync_scenario_of(tree, {})
        return
    if "reasoning_gym" in text:
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(ROOT)
    base = load_config(ROOT / "examples" / "tiny.toml").resolved()
    for section, value in tree.items():
        base[section] = value if isinstance(value, dict) and "use" in value else {**base.get(section, {}), **value}
    report = preflight(loaded_from_tree(base, {}), PluginManager.discover())
    assert report.problems == ()


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "runs/tiny/rollouts" in text:
        _fake_rollout(tmp_path)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    exec(compile(text, "snippet", "exec"), namespace)


def _fake_rollout(directory: Path) -> None:
    import numpy as np

    from miles_core.data.parquet import write_rollouts
    from miles_core.data.trajectory import Trajectory

    path = directory / "runs" / "tiny" / "rollouts"
    path.mkdir(parents=True)
    one = Trajectory(
        token_ids=np.array([1]),
        loss_mask=np.array([False]),
        logprobs=np.array([0.0]),
        versions=np.array([-1]),
        prompt_id="p",
        group_id="g",
        episode_id="e",
        trajectory_id="t",
    )
    write_rollouts(path / "step-000001.parquet", [one], step=1, policy_version=0)


@pytest.mark.parametrize("text", blocks("json"))
def test_json_is_json(text: str) -> None:
    for line in text.splitlines():
        json.loads(line)


@pytest.mark.parametrize("text", blocks("console"))
def test_commands_exist_and_take_their_options(text: str) -> None:
    for line in text.splitlines():
        words = shlex.split(line.partition("#")[0])
        assert words, f"an empty line in a console block: {text!r}"
        if words[0] == "miles":
            _parse(words[1:])
        elif words[0] not in ("python3", "nox", "pytest"):
            assert shutil.which(words[0]), line


def _parse(words: list[str]) -> None:
    """Parse a command line as click would, without running it."""
    command: click.Command = cli
    context = click.Context(cli, info_name="miles")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
        context = click.Context(command, parent=context)
    command.make_parser(context).parse_args(list(words))
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).exists(), word


def test_the_readme_opens_with_the_two_commands() -> None:
    commands = [line for _, text in BLOCK.findall((ROOT / "README.md").read_text())[:1] for line in text.splitlines()]
    assert [c.partition("#")[0].strip() for c in commands] == [
        "python3 -m pip install nox && nox -s quickstart",
        "python3 -m pip install nox && nox -s tests",
    ]
    assert "def quickstart(" in (ROOT / "noxfile.py").read_text()
    assert "def tests(" in (ROOT / "noxfile.py").read_text()


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    extras = [d for group in project["optional-dependencies"].values() for d in group]
    for dependency in [*project["dependencies"], *extras]:
        name = re.split(r"[><=\[]", dependency)[0].strip().lower()
        assert re.search(rf"\b{re.escape(name)}\b", page), f"docs/dependencies.md does not say why {name}"


def test_no_upper_caps() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [d for group in project["optional-dependencies"].values() for d in group]
    assert [d for d in [*project["dependencies"], *extras] if "<" in d or "==" in d or "~=" in d] == []


def test_every_config_key_is_read_somewhere() -> None:
    """A flag without effect is a defect: each key's name is read in a module other than the one that declares it."""
    from pydantic import BaseModel

    from miles_core.config.run import RunConfig

    sources = "\n".join(
        p.read_text() for p in (ROOT / "miles_core").rglob("*.py") if p.name not in ("sections.py", "run.py")
    )

    def keys(model: type[BaseModel]) -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            found.add(name)
            for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                    found |= keys(candidate)
        return found

    unread = {key for key in keys(RunConfig) if not re.search(rf"\.{key}\b", sources)}
    assert unread == set()
