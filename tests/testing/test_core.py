"""The built-ins break no law, and the runner, the suites and the pytest plugin say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_core.cli.plugins import plugins
from miles_core.contracts.component import Example
from miles_core.contracts.rewards import Reward
from miles_core.errors import PluginError, UnknownNameError
from miles_core.testing import runner
from miles_core.testing.kit import Case, Skipped
from miles_core.testing.runner import CheckResult, check_plugin, plugin_checks


def built_ins() -> list[object]:
    """Every component of the core; a server of an engine takes seconds to start."""
    names = sorted({check.component for check in plugin_checks("core")})
    return [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("engines") else []) for name in names]


@pytest.mark.parametrize("component", built_ins())
def test_a_built_in_breaks_no_law(component: str) -> None:
    pytest.importorskip("torch")
    run(component)


def run(component: str) -> None:
    for check in plugin_checks("core"):
        if check.component == component:
            try:
                check.run()
            except Skipped as reason:
                pytest.skip(f"{check.title}: {reason}")
            except AssertionError as error:
                raise AssertionError(f"{check.title}: {error}") from error


def test_unknown_plugin_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'core'"):
        check_plugin("cor")


def test_the_command_fails_with_the_law_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        CheckResult(component="rewards a", check="one law"),
        CheckResult(component="rewards a", check="another law", error="it is broken"),
        CheckResult(component="rewards b", check="one law", skipped="needs an account"),
    ]
    monkeypatch.setattr(runner, "check_plugin", lambda name: results)
    result = CliRunner().invoke(plugins, ["check", "any"])
    assert result.exit_code == 1
    for part in ("ok   rewards a: one law", "FAIL rewards a: another law", "it is broken", "needs an account"):
        assert part in result.output
    assert "1 passed, 1 failed, 1 skipped" in result.output


def test_an_example_that_is_unavailable_skips() -> None:
    class Remote(Reward):
        """Needs an account."""

        @classmethod
        def example(cls, bench):
            return Example(unavailable="needs an account: set KEY")

        async def score(self, samples):
            return [0.0 for _ in samples]

    with Case(Remote) as case, pytest.raises(Skipped, match="set KEY"):
        case.create()
    with Case(Remote, settings={}) as case:
        assert isinstance(case.create(), Remote), "settings of a suite are tried all the same"


def test_what_a_case_lends_is_gone_afterwards() -> None:
    class Source(Reward):
        """Uses everything."""

        async def score(self, samples):
            return []

    with Case(Source) as case:
        directory, tokenizer = case.directory, case.tokenizer
        assert directory.is_dir()
        assert (tokenizer / "tokenizer.json").is_file()
    assert not directory.exists()
    assert not tokenizer.exists()


def pytest_run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path)


def test_the_option_collects_the_checks_of_a_plugin_alone(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    done = pytest_run(tmp_path, "--miles-plugin", "core", "-k", "nonzero_std", "-v")
    assert done.returncode == 0, done.stdout
    assert "core::group_filters_nonzero_std::it_is_total PASSED" in done.stdout
    assert "test_other" not in done.stdout
    both = pytest_run(tmp_path, "--miles-plugin", "core", "test_other.py", "-k", "nonzero_std or other", "-v")
    assert "test_other PASSED" in both.stdout.replace("test_other.py::", "")
    assert "it_is_pure PASSED" in both.stdout


def test_the_option_refuses_an_unknown_plugin(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--miles-plugin", "cor")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'core'" in done.stdout + done.stderr


def test_a_suite_runs_and_reports_laws_and_fixtures_work(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        """
import asyncio, time, urllib.request
from miles_core.rollout.filters import NonzeroStd
from miles_core.testing.suites import FilterSuite

class TestGood(FilterSuite):
    component = NonzeroStd
    settings = {"tolerance": 0.1}

class Broken(NonzeroStd):
    "Raises."
    def drop_reason(self, group, rewards):
        return "low" if 1 / len(rewards) > 2 else None

class TestBroken(FilterSuite):
    component = Broken

def test_fixtures(miles_plugins, miles_tiny_tokenizer, miles_stub_engine, miles_fake_clock):
    assert [info.name for info in miles_plugins.plugins] == ["core"]
    assert miles_tiny_tokenizer.decode(miles_tiny_tokenizer.encode("hello")) == "hello"
    assert urllib.request.urlopen(f"{miles_stub_engine.url}/health").status == 200
    before = time.monotonic()
    asyncio.run(asyncio.sleep(100))
    time.sleep(50)
    assert time.monotonic() - before == 150 == sum(miles_fake_clock.slept)
"""
    )
    done = pytest_run(tmp_path, "-v")
    assert "TestGood::test_it_is_total PASSED" in done.stdout
    assert "test_fixtures PASSED" in done.stdout, done.stdout
    assert "TestBroken::test_it_is_total FAILED" in done.stdout
    assert "raises ZeroDivisionError" in done.stdout
    assert "FilterSuite" not in [line.split("::")[1] for line in done.stdout.splitlines() if line.count("::") == 2]


def test_the_tiny_model_is_a_directory(miles_tiny_model: Path) -> None:
    assert (miles_tiny_model / "config.json").is_file()


def test_the_pytest_plugin_loads_nothing() -> None:
    script = (
        "import pytest, sys; before = set(sys.modules)\n"
        "import miles_core.testing.pytest_plugin\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - {'miles_core'} - set(sys.stdlib_module_names)\n"
        "loaded = {m for m in set(sys.modules) - before if m.startswith('miles_core')}\n"
        "assert not new, new\n"
        "assert loaded == {'miles_core', 'miles_core.testing', 'miles_core.testing.pytest_plugin'}, loaded"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_checks_of_a_plugin_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_core.plugins import LoadFailure, PluginManager

    def discover() -> PluginManager:
        manager = PluginManager()
        manager.failures.append(LoadFailure(name="bad", distribution="d", version="1", message="no module quux"))
        return manager

    monkeypatch.setattr(PluginManager, "discover", discover)
    with pytest.raises(PluginError, match="quux"):
        check_plugin("bad")
