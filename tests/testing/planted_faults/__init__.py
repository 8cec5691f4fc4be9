"""Broken components: for every conformance check, one or more that it must catch.

One module a kind, each with `GOOD`, components that break no law, and `FAULTS`, by the check's name. The good component
of a kind is what `miles plugins new` writes.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from miles_core.testing.scaffold import create_plugin

_ROOT = Path(tempfile.mkdtemp(prefix="miles-scaffolded-"))
atexit.register(shutil.rmtree, _ROOT, ignore_errors=True)


@functools.cache
def scaffolded(kind: str) -> Any:
    """The component class that `miles plugins new KIND` writes."""
    path = create_plugin(kind, f"good-{kind}", _ROOT)
    sys.path.insert(0, str(path))
    module = importlib.import_module(f"miles_good_{kind}.component")
    return next(getattr(module, name) for name in module.__all__ if not name.endswith("Config"))
