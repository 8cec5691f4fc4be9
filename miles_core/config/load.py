"""From files, includes and `--set` overrides to a validated `RunConfig` that knows its origins."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from miles_core.config.origins import OriginTree, flatten, read_toml
from miles_core.config.run import RunConfig
from miles_core.config.sections import ComponentSection
from miles_core.errors import ConfigError, Problem, nearest

__all__ = ["LoadedConfig", "load_config", "loaded_from_tree", "problems_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config with the origin of every value: `file:line`, `--set`, or `default`."""

    config: RunConfig
    origins: OriginTree

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from; for a key inside a value, the value's."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return "default"

    def resolved(self) -> dict[str, Any]:
        """Plain JSON data of the whole config, defaults included."""
        return self.config.model_dump(mode="json")


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a run config. `overrides` are `a.b=value` strings whose value is TOML (a bare word counts as a string).

    `include = ["base.toml"]` at the top merges other files first, paths relative to the including file; later
    values win. Raises `ConfigError` with all problems at once.
    """
    tree, origins = _read(path, ())
    for override in overrides:
        key, value = _parse_override(override)
        _assign(tree, key.split("."), value, override)
        origins = {k: o for k, o in origins.items() if k != key and not k.startswith(f"{key}.")}
        origins.update(dict.fromkeys(flatten({key: value}), f"--set {override}"))
    return loaded_from_tree(tree, origins)


def loaded_from_tree(tree: Mapping[str, Any], origins: OriginTree) -> LoadedConfig:
    """Validate a parsed tree. Raises `ConfigError` with all problems at once."""
    try:
        config = RunConfig.model_validate(_with_default_components(_with_mode(tree)))
    except ValidationError as error:
        raise ConfigError(problems_of(error, origins, model=RunConfig)) from error
    return LoadedConfig(config=config, origins=origins)


_SUPERVISED: dict[str, Any] = {
    "environment": {"use": "supervised"},
    "engine": {"use": "none"},
    "reward": {"use": "none"},
    "objective": {"algorithm": "none", "terms": ["supervised"]},
    "sampling": {"max_new_tokens": 1},
    "schedule": {"group_size": 1},
}
"""A mode is a set of defaults: what the config says stands above it."""


def _with_mode(tree: Mapping[str, Any]) -> dict[str, Any]:
    run = tree.get("run")
    supervised = isinstance(run, Mapping) and run.get("mode") == "supervised"
    return _merge(_SUPERVISED, tree) if supervised else dict(tree)


def _with_default_components(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`[engine] max_running = 4` alone configures the default engine: `use` is filled in."""
    filled = dict(tree)
    for name, field in RunConfig.model_fields.items():
        section = filled.get(name)
        if isinstance(field.default, ComponentSection) and isinstance(section, Mapping) and "use" not in section:
            filled[name] = {"use": field.default.use, **section}
    return filled


def _read(path: Path, trail: tuple[Path, ...]) -> tuple[dict[str, Any], OriginTree]:
    resolved = path.resolve()
    if resolved in trail:
        chain = " → ".join(p.name for p in (*trail, resolved))
        raise ConfigError([Problem(key="include", message=f"files include each other: {chain}", origin=str(path))])
    own, own_origins = read_toml(path)
    includes = own.pop("include", [])
    own_origins = {k: v for k, v in own_origins.items() if k != "include"}
    if not (isinstance(includes, list) and all(isinstance(i, str) for i in includes)):
        raise ConfigError(
            [Problem(key="include", message="must be a list of file names", origin=str(path), value=includes)]
        )
    tree: dict[str, Any] = {}
    origins: OriginTree = {}
    for include in includes:
        base, base_origins = _read(path.parent / include, (*trail, resolved))
        tree, origins = _merge(tree, base), _merge_origins(origins, base_origins, base)
    return _merge(tree, own), _merge_origins(origins, own_origins, own)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; everything else is replaced. A table that chooses another component starts empty."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(old, Mapping)
            and value.get("use", old.get("use")) == old.get("use")
        ):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _merge_origins(below: OriginTree, above: OriginTree, tree: Mapping[str, Any]) -> OriginTree:
    replaced = {key for key, value in flatten(tree).items() if not isinstance(value, Mapping)}
    kept = {k: v for k, v in below.items() if k not in replaced}
    return {**kept, **above}


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            [
                Problem(
                    key="--set",
                    value=override,
                    message="must look like section.key=value",
                    origin="command line",
                )
            ]
        )
    try:
        return key, tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text.strip()


def _assign(tree: dict[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    node: Any = tree
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = node[_index(node, part, override)]
            continue
        child = node.get(part)
        if isinstance(child, str) and depth == 0:
            child = {"use": child}  # the short form of a component section
        if not isinstance(child, dict | list):
            child = {}
        node[part] = child
        node = child
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = value
    else:
        node[parts[-1]] = value


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(
            [
                Problem(
                    key="--set",
                    value=override,
                    message=f"{part!r} is not an index of a list of {len(items)}",
                    origin="command line",
                )
            ]
        )
    return int(part)


def problems_of(
    error: ValidationError, origins: OriginTree, *, model: type[BaseModel], prefix: str = ""
) -> list[Problem]:
    """Pydantic's errors as problems with key, origin, allowed values and the nearest legal name."""
    problems = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        key = prefix + ".".join(location)
        message = item["msg"]
        hint = ""
        value: object = item["input"]
        if item["type"] == "extra_forbidden":
            fields = _fields_at(model, location[:-1])
            message = f"unknown key; {nearest(location[-1], fields)}"
            hint = "remove it, or correct its name"
        elif item["type"] == "missing":
            message, value = "required, and nothing gives it", None
            hint = f"add {location[-1]} under [{'.'.join(key.split('.')[:-1]) or location[-1]}]"
        if isinstance(value, Mapping | BaseModel):
            value = None
        problems.append(Problem(key=key, message=message, origin=_origin(key, origins), value=value, hint=hint))
    return problems


def _origin(key: str, origins: OriginTree) -> str:
    if key in origins:
        return origins[key]
    inside = [origin for k, origin in origins.items() if k.startswith(f"{key}.")]
    if inside:
        return inside[0]
    parent = key.rpartition(".")[0]
    return _origin(parent, origins) if parent else ""


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Field names of the model at a location inside `model`."""
    current: Any = model
    for part in location:
        if part.isdigit():
            continue
        field = current.model_fields.get(part)
        found = None if field is None else _model_in(field.annotation)
        if found is None:
            return []
        current = found
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
