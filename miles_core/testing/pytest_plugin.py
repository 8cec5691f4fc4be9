"""Fixtures for plugin tests, and `pytest --miles-plugin NAME`. Loaded by pytest wherever miles-core is installed, so it
imports nothing but pytest until something of it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from miles_core.data.tokenizer import FileTokenizer
    from miles_core.plugins import PluginManager
    from miles_core.testing.clock import FakeClock
    from miles_core.testing.runner import PluginCheck
    from miles_core.testing.stub_engine import ServedStub

__all__ = ["miles_fake_clock", "miles_plugins", "miles_stub_engine", "miles_tiny_model", "miles_tiny_tokenizer"]


@pytest.fixture
def miles_plugins() -> PluginManager:
    """An isolated plugin manager: the core's own plugin and nothing else that happens to be installed."""
    from miles_core.plugins import PluginManager

    return PluginManager.discover(enable=["core"])


@pytest.fixture(scope="session")
def miles_tiny_model() -> Path:
    """Directory of the tiny model (`tiny:0`); skips where torch or transformers is missing."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from miles_core.testing.tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def miles_tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """A byte-level tokenizer with ChatML's special tokens. Needs no torch."""
    from miles_core.data.tokenizer import load_tokenizer
    from miles_core.testing.tokenizers import write_tokenizer

    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("miles-tokenizer")))


@pytest.fixture
def miles_stub_engine() -> Iterator[ServedStub]:
    """A stub engine that serves while the test runs: `.url` and `.engine`, whose attributes the test sets and reads."""
    from miles_core.testing.stub_engine import StubEngine, hashed_script, served_stub

    with served_stub(StubEngine(hashed_script(256, 4))) as served:
        yield served


@pytest.fixture
def miles_fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock that stands still until the test moves it; see `miles_core.testing.clock.FakeClock`."""
    from miles_core.testing.clock import FakeClock

    clock = FakeClock()
    clock.install(monkeypatch)
    return clock


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("miles").addoption(
        "--miles-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="run the conformance checks of this installed miles plugin (repeatable); alone, nothing else is collected",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    alone = config.getoption("--miles-plugin") and config.args_source is not pytest.Config.ArgsSource.ARGS
    return True if alone else None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    names: list[str] = config.getoption("--miles-plugin")
    if not names:
        return
    from miles_core.errors import PluginError
    from miles_core.testing.runner import plugin_checks

    try:
        found = [(name, check) for name in names for check in plugin_checks(name)]
    except PluginError as error:
        raise pytest.UsageError(str(error)) from error
    for name, check in found:
        title = f"{name}::{check.component}::{check.title}".replace(" ", "_")
        items.append(_Item.from_parent(session, name=title, check=check))


class _Item(pytest.Item):
    """One conformance check of a registered component."""

    def __init__(self, *, check: PluginCheck, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._check = check

    def runtest(self) -> None:
        from miles_core.testing.kit import Skipped

        try:
            self._check.run()
        except Skipped as reason:
            pytest.skip(str(reason))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A broken law is one sentence; what a component raised comes with its traceback."""
        if isinstance(excinfo.value, AssertionError) and excinfo.value.__cause__ is None:
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return Path(self._check.registration.component.__module__), None, self.name
