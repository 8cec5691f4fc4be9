"""Runs the conformance checks of an installed plugin, for `miles plugins check` and `pytest --miles-plugin`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator

from miles_core.errors import PluginLoadError, UnknownNameError, nearest
from miles_core.plugins import PluginManager, Registration
from miles_core.testing.kit import Case, Check, Skipped, check_title, checks_of, run_check

__all__ = ["CheckResult", "PluginCheck", "check_plugin", "plugin_checks"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What became of one check: `error` is the broken law, None when it holds; `skipped` says why it was not made."""

    component: str
    check: str
    error: str | None = None
    skipped: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PluginCheck:
    """One check of one registered component."""

    registration: Registration
    check: Check

    @property
    def component(self) -> str:
        return f"{self.registration.hook.removeprefix('miles_')} {self.registration.name}"

    @property
    def title(self) -> str:
        return check_title(self.check)

    def run(self) -> None:
        """Raises what the check found, or `Skipped`."""
        with Case(self.registration.component) as case:
            run_check(self.check, self.registration.hook, case)


def plugin_checks(name: str) -> list[PluginCheck]:
    """Every check of the installed plugin `name`. Raises `UnknownNameError` when there is none of that name,
    `PluginLoadError` when it does not load."""
    manager = PluginManager.discover()
    for failure in manager.failures:
        if failure.name == name:
            raise PluginLoadError(failure.message)
    known = [info.name for info in manager.plugins]
    if name not in known:
        raise UnknownNameError(f"no plugin named {name!r} is installed: {nearest(name, known)}")
    return list(_checks(manager, name))


def _checks(manager: PluginManager, name: str) -> Iterator[PluginCheck]:
    for registration in manager.registrations():
        if registration.plugin == name:
            for check in checks_of(registration.hook):
                yield PluginCheck(registration=registration, check=check)


def check_plugin(name: str) -> list[CheckResult]:
    """Run them all, quietly: what components print meanwhile is not shown."""
    return [_run(check) for check in plugin_checks(name)]


def _run(check: PluginCheck) -> CheckResult:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            check.run()
    except Skipped as reason:
        return CheckResult(component=check.component, check=check.title, skipped=str(reason))
    except AssertionError as error:
        return CheckResult(component=check.component, check=check.title, error=str(error) or "an assertion failed")
    return CheckResult(component=check.component, check=check.title)
