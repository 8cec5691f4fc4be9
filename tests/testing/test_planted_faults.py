"""Every check catches its planted faults, and passes on components that break no law."""

from __future__ import annotations

import functools
import gc
import importlib
import sys

import pytest

from miles_core.plugins import REGISTRATION_HOOKS
from miles_core.testing.kit import KINDS, Case, Skipped, check_title, checks_of, run_check

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What is there already (torch, for one) is left out of the collections below."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def swept(monkeypatch):
    """A broken component may leave streams and processes unclosed: they are collected here, and not in another test."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    yield
    gc.collect()


def name_of(check):
    return check_title(check).replace(" ", "_")


def faults_of(hook, check):
    own = importlib.import_module(f"planted_faults.{KINDS[hook].checks}")
    shared = importlib.import_module("planted_faults.generic")
    return (shared if is_generic(check) else own).FAULTS.get(name_of(check), ())


def is_generic(check):
    return isinstance(check, functools.partial) or check.__module__.endswith(".generic")


def every_check():
    """Each check of each kind. Those that all kinds share are taken from rewards, where their faults are planted."""
    for hook in KINDS:
        for check in checks_of(hook):
            if hook == "miles_rewards" or not is_generic(check):
                yield pytest.param(hook, check, id=f"{KINDS[hook].name}-{name_of(check)}")


def every_fault():
    for parameter in every_check():
        hook, check = parameter.values
        for fault in faults_of(hook, check):
            yield pytest.param(hook, check, fault, id=f"{parameter.id}-{fault.__name__}")


def every_good_component():
    for hook, kind in KINDS.items():
        for component in importlib.import_module(f"planted_faults.{kind.checks}").GOOD:
            yield pytest.param(hook, component, id=f"{kind.name}-{component.__name__}")


def test_every_hook_is_a_kind():
    assert tuple(KINDS) == REGISTRATION_HOOKS


@pytest.mark.parametrize(("hook", "check"), list(every_check()))
def test_every_check_has_a_planted_fault(hook, check):
    assert faults_of(hook, check), f"plant a component that breaks the law {name_of(check)!r}"


def test_no_fault_is_planted_for_a_check_that_is_gone():
    for hook, kind in KINDS.items():
        planted = importlib.import_module(f"planted_faults.{kind.checks}").FAULTS
        assert set(planted) == {name_of(check) for check in checks_of(hook) if not is_generic(check)}


@pytest.mark.parametrize(("hook", "check", "fault"), list(every_fault()))
def test_the_fault_is_caught(hook, check, fault):
    with Case(fault) as case, pytest.raises(AssertionError) as caught:
        run_check(check, hook, case)
    assert len(str(caught.value).split()) >= 4, "a sentence that says what is broken"


@pytest.mark.parametrize(("hook", "component"), list(every_good_component()))
def test_a_good_component_passes(hook, component):
    for check in checks_of(hook):
        with Case(component) as case:
            try:
                run_check(check, hook, case)
            except Skipped as reason:
                pytest.fail(f"{name_of(check)} was not made: {reason}")
