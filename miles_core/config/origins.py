"""TOML with origins: which file and line gave each value."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError, Problem

__all__ = ["OriginTree", "flatten", "read_toml"]

OriginTree = dict[str, str]
"""Dotted key → where its value came from, such as `run.toml:12`."""

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of all leaves; an array of tables is numbered (`evaluation.datasets.0.name`)."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{dotted}."))
        elif isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                leaves.update(flatten(item, f"{dotted}.{index}."))
        else:
            leaves[dotted] = value
    return leaves


def read_toml(path: Path) -> tuple[dict[str, Any], OriginTree]:
    """Parse a file; origins are `name:line` of each leaf. Raises `ConfigError` for an unreadable or invalid file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "give the path of a run config, for example examples/quickstart.toml"
        raise ConfigError([Problem(key="(file)", message=f"cannot read {path}: {error}", hint=hint)]) from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            [
                Problem(
                    key="(file)",
                    message=f"not valid TOML: {error}",
                    origin=str(path),
                    hint="see https://toml.io",
                )
            ]
        ) from error
    lines = _key_lines(text)
    origins = {key: f"{path}:{_line_of(key, lines)}" for key in flatten(tree)}
    return tree, origins


def _line_of(key: str, lines: Mapping[str, int]) -> int:
    """Line of a leaf, or of the nearest table around it (a key inside an inline table)."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return 1


def _key_lines(text: str) -> dict[str, int]:
    """Line number of every `key =` and `[table]` in the text; the inside of multi-line strings is passed over."""
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix = ""
    closing = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if closing:
            if closing in line:
                closing = ""
            continue
        header = _HEADER.match(line)
        key = None if header else _KEY.match(line)
        if header:
            name = _plain(header.group(2))
            if header.group(1) == "[[":
                index = counts.get(name, -1) + 1
                counts[name] = index
                name = f"{name}.{index}"
            else:
                parent, _, rest = name.rpartition(".")
                name = f"{parent}.{counts[parent]}.{rest}" if parent in counts else name
            prefix = f"{name}."
            found.setdefault(name, number)
        elif key:
            found.setdefault(prefix + _plain(key.group(1)), number)
        for quote in ('"""', "'''"):
            if line.count(quote) % 2 == 1:
                closing = quote
    return found


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
