"""Tools as TypeScript declarations, which is how the tokenizer of Kimi K2.5 offers them to the model.

JSON Schema is written as types: required properties first, each group by name; descriptions and bounds as comments
above the line they are about; `$defs` as interfaces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["declarations"]

_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_SIMPLE = {"integer": "number", "object": "{}", "array": "Array<any>"}


def declarations(tools: Sequence[Mapping[str, Any]]) -> str:
    """The namespace that offers `tools`; those that are no functions are left out. Raises `ValueError` for a schema
    that has no place in it."""
    functions = [tool.get("function", tool) for tool in tools if tool.get("type", "function") == "function"]
    if not functions:
        return ""
    body = "\n".join(_function(function) for function in functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    definitions: Mapping[str, Any] = schema.get("$defs") or {}
    lines: list[str] = []
    parameters = _object(schema, "", definitions)
    if _refers_to_itself(schema.get("properties") or {}):
        members = ",\n".join(_members(schema, "", definitions, sort=False))
        inner = f"\n{members}\n" if members else ""
        lines.append(f"interface parameters {{{inner}}}")
        parameters = "parameters"
    for name, definition in definitions.items():
        described = definition.get("description") or ""
        lines += [_comment(described)] if described else []
        lines.append(f"interface {name} {_type(definition, '', definitions)}")
    if function.get("description"):
        lines.append(_comment(function["description"]))
    lines.append(f"type {function.get('name', 'function')} = (_: {parameters}) => any;")
    return "\n".join(lines)


def _type(schema: Any, indent: str, definitions: Mapping[str, Any]) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _reference(schema["$ref"], definitions)
    if "anyOf" in schema:
        return " | ".join(_type(option, indent, definitions) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{v}"' if isinstance(v, str) else json.dumps(v) for v in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_SIMPLE.get(str(one), str(one)) for one in kind)
    if kind == "object":
        return _object(schema, indent, definitions)
    if kind == "array":
        return _array(schema, indent, definitions)
    if isinstance(kind, str):
        return "number" if kind == "integer" else kind
    if not schema:
        return "any"
    raise ValueError(
        f"a tool's JSON schema {schema!r:.200} has none of type, enum, anyOf and $ref; Kimi cannot be told"
    )


def _object(schema: Mapping[str, Any], indent: str, definitions: Mapping[str, Any]) -> str:
    members = _members(schema, indent, definitions)
    further = schema.get("additionalProperties")
    if further is not None:
        kind = {True: "any", False: "never"}[further] if isinstance(further, bool) else None
        members.append(f"{indent}  [k: string]: {kind or _type(further, f'{indent}  ', definitions)}")
    if not members:
        return "{}"
    joined = ",\n".join(members)
    return f"{{\n{joined}\n{indent}}}"


def _members(schema: Mapping[str, Any], indent: str, definitions: Mapping[str, Any], *, sort: bool = True) -> list[str]:
    required = set(schema.get("required") or ())
    names = list(schema.get("properties") or {})
    if sort:
        names.sort(key=lambda name: (name not in required, name))
    inner = f"{indent}  "
    out: list[str] = []
    for name in names:
        member = schema["properties"][name]
        default = member.get("default") if isinstance(member, Mapping) else None
        comments = _comments(member, inner)
        if default is not None:
            comments += f"{inner}// Default: {json.dumps(default, ensure_ascii=False)}\n"
        mark = "" if name in required else "?"
        out.append(f"{comments}{inner}{name}{mark}: {_type(member, inner, definitions)}")
    return out


def _array(schema: Mapping[str, Any], indent: str, definitions: Mapping[str, Any]) -> str:
    items = schema.get("items")
    if not items:
        return "Array<any>"
    comments = _comments(items, f"{indent}  ")
    if not comments:
        return f"Array<{_type(items, indent, definitions)}>"
    return f"Array<\n{comments}{indent}  {_type(items, f'{indent}  ', definitions)}\n{indent}>"


def _comments(schema: Any, indent: str) -> str:
    """Description and bounds of a type, a line each."""
    if not isinstance(schema, Mapping):
        return ""
    out = f"{_comment(schema['description'], indent)}\n" if schema.get("description") else ""
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    kind = schema.get("type")
    bounds = _BOUNDS.get(kind, ()) if plain and isinstance(kind, str) else ()
    found = ", ".join(f"{key}: {schema[key]}" for key in bounds if key in schema)
    return f"{out}{indent}// {found}\n" if found else out


def _comment(text: str, indent: str = "") -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _reference(reference: str, definitions: Mapping[str, Any]) -> str:
    if reference == "#":
        return "parameters"
    name = reference.removeprefix("#/$defs/")
    if name == reference or name not in definitions:
        raise ValueError(f"a tool's JSON schema refers to {reference!r}; only '#' and '#/$defs/NAME' can be followed")
    return name


def _refers_to_itself(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return schema.get("$ref") == "#" or any(_refers_to_itself(value) for value in schema.values())
    return isinstance(schema, list) and any(_refers_to_itself(item) for item in schema)
