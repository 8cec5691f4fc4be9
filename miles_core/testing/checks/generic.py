"""Laws of every component: its section, its documentation, its needs and limits, what importing it costs.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from typing import Any

from pydantic import ValidationError

from miles_core.contracts.component import ComponentConfig, Conflict, Requirement
from miles_core.testing.kit import Case, Check, Kind

__all__ = ["generic_checks"]


def generic_checks(kind: Kind) -> tuple[Check, ...]:
    """The checks of this module, for components of `kind`."""
    checks: list[Check] = [
        class_is_documented,
        config_is_frozen,
        config_refuses_unknown_keys,
        config_keys_are_documented,
        needs_and_limits_are_data,
        functools.partial(instance_is_of_its_kind, kind=kind),
    ]
    if not kind.trainer:
        checks.append(base_process_imports_no_torch)
    return tuple(checks)


def class_is_documented(case: Case) -> None:
    assert inspect.cleandoc(case.component.__dict__.get("__doc__") or ""), (
        f"{case.component.__qualname__} has no docstring: `miles plugins show` prints its first line"
    )


def config_is_frozen(case: Case) -> None:
    config = case.component.Config
    assert issubclass(config, ComponentConfig), f"Config is {config!r}, expected a subclass of ComponentConfig"
    assert config.model_config.get("frozen"), f"{config.__qualname__} is not frozen: a run's config never changes"


def config_refuses_unknown_keys(case: Case) -> None:
    config = case.component.Config
    try:
        config.model_validate({"no_such_key_of_any_section": 1})
    except ValidationError as error:
        refused = any(entry["type"] == "extra_forbidden" for entry in error.errors())
    else:
        refused = False
    assert refused, f"{config.__qualname__} takes keys that it does not know: a misspelled key would have no effect"


def config_keys_are_documented(case: Case) -> None:
    config = case.component.Config
    silent = [name for name, field in config.model_fields.items() if not (field.description or "").strip()]
    assert not silent, (
        f"keys of {config.__qualname__} without a docstring: {', '.join(silent)} (a string under the field)"
    )


def needs_and_limits_are_data(case: Case) -> None:
    for name, kind in (("requires", Requirement), ("conflicts", Conflict)):
        listed: Any = getattr(case.component, name)
        assert isinstance(listed, tuple), f"{name} is a {type(listed).__name__}, expected a tuple of {kind.__name__}"
        for entry in listed:
            assert isinstance(entry, kind), f"{name} holds {entry!r}, expected a {kind.__name__}"
            assert entry.key, f"{name}: an entry names no key"
            assert entry.reason.strip(), f"{name}: the entry for {entry.key!r} gives no reason"
            assert isinstance(entry.values, tuple), f"{name}: the values of {entry.key!r} are no tuple"
            at_all = isinstance(entry, Conflict) or entry.key.startswith("import:")
            assert entry.values or at_all, f"{name}: {entry.key!r} lists no values"


def instance_is_of_its_kind(case: Case, *, kind: Kind) -> None:
    contract = kind.load_contract()
    try:
        instance = case.create()
    except (TypeError, ValidationError) as error:
        raise AssertionError(
            f"no instance can be made from the example's settings {dict(case.example.settings)}: {error}"
        ) from error
    assert isinstance(instance, contract), (
        f"{kind.hook} offers {case.component.__qualname__}, which is no {contract.__name__}"
    )


def base_process_imports_no_torch(case: Case) -> None:
    module = case.component.__module__
    found = _heavy_modules(module, getattr(sys.modules.get(module), "__file__", None))
    assert not found, (
        f"importing {module} imports {found}: this kind is used in processes without torch; import it in the function "
        "that needs it"
    )


_IMPORT = """
import importlib, runpy, sys
module, file = sys.argv[1:]
try:
    importlib.import_module(module)
except ModuleNotFoundError as error:
    if not file or error.name is None or not f"{module}.".startswith(f"{error.name}."):
        raise
    runpy.run_path(file, run_name=module)  # a module that only its own process can name, such as a test's
print(",".join(name for name in ("torch", "transformers") if name in sys.modules))
"""


@functools.cache
def _heavy_modules(module: str, file: str | None) -> str:
    """The heavy packages that a new interpreter has after importing `module`, comma-separated."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _IMPORT, module, file or ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} cannot be imported in a process of its own:\n{done.stderr[-2000:]}"
    return (done.stdout.splitlines() or [""])[-1]
