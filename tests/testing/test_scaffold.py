"""`miles plugins new`, for every kind: generated, installed and tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_core.cli.plugins import plugins
from miles_core.errors import DuplicateNameError, PluginError, UnknownNameError
from miles_core.plugins import ENTRY_POINT_GROUP
from miles_core.testing.kit import KINDS
from miles_core.testing.scaffold import create_plugin

ALL = [kind.name for kind in KINDS.values()]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    into = tmp_path_factory.mktemp("generated")
    return {kind: create_plugin(kind, f"new-{kind}", into) for kind in ALL}


@pytest.fixture(scope="module")
def installed_plugins(generated: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them in one directory, by one call of pip."""
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *map(str, generated.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def outcome(generated: dict[str, Path], installed_plugins: Path) -> str:
    """What pytest says of all generated tests, in one run, `-v`."""
    tests = [str(path / "tests") for path in generated.values()]
    environment = {**os.environ, "PYTHONPATH": str(installed_plugins), "OMP_NUM_THREADS": "1"}
    root = next(iter(generated.values())).parent
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", f"--rootdir={root}", "-p", "no:asyncio", *tests]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_generated_tests_pass(kind: str, outcome: str) -> None:
    pytest.importorskip("torch")
    lines = [line for line in outcome.splitlines() if f"miles-new-{kind.replace('_', '-')}/" in line]
    verdicts = [match[1] for line in lines if (match := re.search(r"::test_\w+ (\w+)", line))]
    assert len(verdicts) >= 8, outcome[-3000:]
    assert set(verdicts) == {"PASSED"}, outcome[-6000:]


@pytest.mark.slow
def test_installed_plugins_load_and_are_checked(installed_plugins: Path) -> None:
    script = (
        "from miles_core.plugins import PluginManager\n"
        "from miles_core.testing.runner import check_plugin\n"
        "manager = PluginManager.discover()\n"
        "assert not manager.failures, manager.failures\n"
        "print(*sorted(i.name for i in manager.plugins if i.name.startswith('new_')))\n"
        "print(all(r.error is None for r in check_plugin('new_rewards')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed_plugins)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == [" ".join(sorted(f"new_{kind}" for kind in ALL)), "True"], done.stderr


@pytest.mark.parametrize("kind", ALL)
def test_files_fit_together(kind: str, generated: dict[str, Path]) -> None:
    path = generated[kind]
    project = tomllib.loads((path / "pyproject.toml").read_text())
    assert project["project"]["entry-points"][ENTRY_POINT_GROUP] == {f"new_{kind}": f"miles_new_{kind}"}
    readme = (path / "README.md").read_text()
    (snippet,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    assert f"new_{kind}" in str(tomllib.loads(snippet)), "the config snippet uses the component"
    texts = [file.read_text() for file in path.rglob("*") if file.is_file()]
    assert not any(re.search(r"\$\{?[a-z_]+", text) for text in texts), "a placeholder is left"
    sources = [line for file in path.rglob("*.py") for line in file.read_text().splitlines()]
    assert not [line for line in sources if len(line) > 120]


@pytest.mark.slow
def test_generated_code_is_clean(generated: dict[str, Path]) -> None:
    root = next(iter(generated.values())).parent
    sources = [str(path / f"miles_new_{kind}") for kind, path in generated.items()]
    rules = [
        "check",
        "--isolated",
        "--line-length=120",
        "--select=E,F,W,N,UP,B,C4,SIM,RUF,TID,ANN,D1",
        "--ignore=D105,D107,RUF001,RUF002,RUF003",
    ]
    done = subprocess.run([sys.executable, "-m", "ruff", *rules, *sources], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout


def test_unknown_kind_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rewards'"):
        create_plugin("reward", "x", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "-x", "x-", "a b", "a/b", "../x", "naïve"])
def test_a_name_that_no_distribution_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no name of a distribution"):
        create_plugin("rewards", name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    path = create_plugin("rewards", "mine", tmp_path)
    (path / "README.md").write_text("kept")
    with pytest.raises(PluginError, match="exists already"):
        create_plugin("data_sources", "mine", tmp_path)
    assert (path / "README.md").read_text() == "kept"


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DuplicateNameError, match="'exact' is registered by the plugin 'core'"):
        create_plugin("rewards", "exact", tmp_path)
    with pytest.raises(DuplicateNameError, match="a plugin 'core' is installed"):
        create_plugin("rewards", "core", tmp_path)


@pytest.mark.parametrize(
    ("name", "distribution", "class_name"),
    [
        ("My.Length_2", "miles-my-length-2", "MyLength2Reward"),
        ("miles-length", "miles-length", "LengthReward"),
        ("7up", "miles-7up", "Miles7upReward"),
    ],
)
def test_names_are_normalised(name: str, distribution: str, class_name: str, tmp_path: Path) -> None:
    path = create_plugin("rewards", name, tmp_path)
    assert path.name == distribution
    package = distribution.replace("-", "_")
    assert f"class {class_name}(Reward" in (path / package / "component.py").read_text()


def test_a_class_never_hides_what_its_module_imports(tmp_path: Path) -> None:
    path = create_plugin("data_sources", "data", tmp_path)
    assert "class MilesDataSource(DataSource" in (path / "miles_data" / "component.py").read_text()


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(plugins, ["new", "rewards", "mine", "--into", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "miles-mine") in result.output
