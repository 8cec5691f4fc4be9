"""Functions that a config names: `module:function`, or a function of a Python file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from miles_core.errors import ConfigError, Problem, nearest

__all__ = ["load_function"]


def load_function(reference: str, *, key: str) -> Callable[..., Any]:
    """The callable that `reference` names: `package.module:name`, or `path/to/file.py:name`.

    `key` is the config key that holds it, for the error. Raises `ConfigError` when there is no such module or name;
    what the module itself raises while it is imported passes through.
    """
    place, separator, name = reference.rpartition(":")

    def problem(message: str, hint: str) -> ConfigError:
        return ConfigError([Problem(key=key, value=reference, message=message, hint=hint)])

    if not separator or not place or not name.isidentifier():
        raise problem("is no function reference", "write module:function or path/to/file.py:function")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise problem(f"there is no file {path.absolute()}", "a relative path starts where the run starts")
        module = _from_file(path.resolve())
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there; something that it imports is not
            raise problem(
                f"there is no module {error.name}",
                "install it, set PYTHONPATH, or name a file: path/to/file.py:function",
            ) from error
    found = getattr(module, name, None)
    if not callable(found):
        offered = [item for item, value in vars(module).items() if callable(value) and not item.startswith("_")]
        raise problem(f"{place} has no function {name}", nearest(name, offered))
    return found  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    """The module of a file, imported once a process whatever it is asked for."""
    name = f"miles_file_{path.stem}_{xxhash.xxh3_64_hexdigest(str(path).encode())}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
