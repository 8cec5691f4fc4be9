"""A cache of built directories: each appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["build_once", "cache_root"]


def cache_root(cache_dir: Path | None = None) -> Path:
    """Where converted models are kept: `cache_dir`, else `MILES_CACHE`, else the user's cache directory."""
    if cache_dir is not None:
        return cache_dir
    if configured := os.environ.get("MILES_CACHE"):
        return Path(configured).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "miles-core"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "miles-core"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, building it first when it is missing.

    `build` fills a temporary sibling, which is then renamed: a killed process leaves no half-built `target`. Two
    processes may build at the same time; the first to finish wins and the other's copy is discarded, so `build`
    must be a function of what names `target`.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
