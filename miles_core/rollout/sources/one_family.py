"""One task family of reasoning-gym, without the other hundred.

`import reasoning_gym` imports every family, and with them matplotlib and sympy: two seconds of CPU that every check and
every start would pay. A family is one module that registers itself, so it is imported here below packages that have a
path and nothing else. These are taken out of `sys.modules` again: who imports reasoning_gym gets the whole of it. A
family that is not found this way comes from the whole package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

__all__ = ["one_family"]

_PACKAGE = "reasoning_gym"
_NAME = re.compile(r'^DATASET_NAME\s*=\s*"([^"]+)"', re.MULTILINE)
_lock = threading.Lock()
_own: dict[str, ModuleType] = {}
"""Our copies of the package's modules, by name."""


@contextlib.contextmanager
def one_family(family: str) -> Iterator[ModuleType]:
    """reasoning-gym's `factory` module, with at least `family` registered if there is such a family. Inside, the family
    may import what it likes of its own package, as some do when a data set is made."""
    with _lock:
        module = None if _PACKAGE in sys.modules else _modules().get(family)
        if module is not None:
            with _alone(module):
                importlib.import_module(module)
                yield importlib.import_module(f"{_PACKAGE}.factory")
            return
    importlib.import_module(_PACKAGE)
    yield importlib.import_module(f"{_PACKAGE}.factory")


@functools.cache
def _root() -> Path:
    """Where the package lies. Raises `ModuleNotFoundError` when it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {_PACKAGE!r}", name=_PACKAGE)
    return Path(spec.origin).parent


@functools.cache
def _modules() -> dict[str, str]:
    """Module of each family, from the sources of the installed package."""
    root = _root()
    found: dict[str, str] = {}
    for path in sorted(root.glob("*/*.py")):
        for name in _NAME.findall(path.read_text(encoding="utf-8")):
            found[name] = ".".join((_PACKAGE, *path.relative_to(root).with_suffix("").parts))
    return found


@contextlib.contextmanager
def _alone(module: str) -> Iterator[None]:
    """Inside, the package and the module's own category are bare, and what is imported of them is ours."""
    for name in (_PACKAGE, module.rpartition(".")[0]):
        if name not in _own:
            _own[name] = _bare(name)
    sys.modules.update(_own)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n == _PACKAGE or n.startswith(f"{_PACKAGE}.")]:
            _own[name] = sys.modules.pop(name)


def _bare(name: str) -> ModuleType:
    """A package with its path, whose own code has not run."""
    place = _root().joinpath(*name.split(".")[1:])
    bare = importlib.machinery.ModuleSpec(name, None, is_package=True)
    bare.submodule_search_locations = [str(place)]
    return importlib.util.module_from_spec(bare)
