"""XML tool calls: `<tool_call>` around `<function=NAME>` around `<parameter=KEY>` blocks.

Format: the chat templates of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3. A text argument stands as it is, and
every other value as JSON, so the text `1` and the number 1 are written alike. Which one is meant is what the schema of
the offered tool says; without a schema it is the text. Values keep the spelling that the model gave them (`1.0`,
`{"a":1}`): arguments are JSON text, and rendering takes the spelling from there.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from miles_core.tito.families.calls import CLOSE, OPEN, CallFormat, Piece, Reader, Tools, name_of
from miles_core.tito.families.hermes import read_json, read_object

__all__ = ["XmlCalls", "function_list", "schema_of", "tool_prompt_pieces"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
# A value ends where something follows that only a parameter's end has behind it: `</parameter>` alone may be its text.
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_END = re.compile(rf"</function>\s*{CLOSE}")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_JSON = {text: spelled for spelled, text in _PYTHON.items()}
_REFERENCES = 8  # a schema may refer to itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class XmlCalls(CallFormat):
    """`python_words`: true, false and null are written `True`, `False` and `None`. Both spellings are read.

    A call without its closing tags or with a repeated key is malformed. White space between tags may vary; one newline
    at either end of a value is the format's.
    """

    before: str = "\n\n"
    between: str = "\n"
    behind: str = ""
    always_before: bool = False
    python_words: bool = False

    def call_pieces(self, call: Mapping[str, Any]) -> list[Piece]:
        """See `CallFormat.call_pieces`. Raises `ValueError` for arguments that are no JSON object."""
        name, arguments = name_of(call)
        body = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else self._word(text)}\n</parameter>\n"
            for key, (value, text) in members_of(name, arguments).items()
        )
        return [(OPEN, True), (f"\n<function={name}>\n{body}</function>\n", False), (CLOSE, True)]

    def reader(self, text: str, tools: Tools) -> Reader:
        """See `CallFormat.reader`."""
        ends = [match.span() for match in _VALUE_END.finditer(text)]

        def read(position: int) -> tuple[dict[str, Any], int] | None:
            function = _FUNCTION.match(text, position)
            if function is None:
                return None
            values: dict[str, str] = {}
            position = function.end()
            while (parameter := _PARAMETER.match(text, position)) is not None:
                number = bisect.bisect_left(ends, (parameter.end(), 0))
                if number == len(ends) or parameter[1] in values:
                    return None
                stop, position = ends[number]
                values[parameter[1]] = text[parameter.end() : stop].removeprefix("\n").removesuffix("\n")
            end = _END.match(text, position)
            if end is None:
                return None
            members = (
                f"{json.dumps(key, ensure_ascii=False)}: {json_of(value, schema_of(tools, function[1], key))}"
                for key, value in values.items()
            )
            arguments = f"{{{', '.join(members)}}}"
            return {"type": "function", "function": {"name": function[1], "arguments": arguments}}, end.end()

        return read

    def _word(self, text: str) -> str:
        return _JSON.get(text, text) if self.python_words else text


def tool_prompt_pieces(listing: str) -> list[Piece]:
    """The paragraph of the system prompt that offers the tools of `listing` and shows how to call them."""
    return [
        (
            f"# Tools\n\nYou have access to the following functions:\n\n<tools>{listing}\n</tools>\n\n"
            "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n",
            False,
        ),
        (OPEN, True),
        (
            "\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
            "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\n"
            "multiple lines\n</parameter>\n</function>\n",
            False,
        ),
        (CLOSE, True),
        (
            "\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner "
            "<function=...></function> block must be nested within ",
            False,
        ),
        (OPEN, True),
        (CLOSE, True),
        (
            " XML tags\n- Required parameters MUST be specified\n- You may provide optional reasoning for your "
            "function call in natural language BEFORE the function call, but NOT after\n- If there is no function "
            "call available, answer the question like normal with your current knowledge and do not tell the user "
            "about function calls\n</IMPORTANT>",
            False,
        ),
    ]


def function_list(tools: Tools, *, named: bool) -> str:
    """`tools` as `<function>` blocks. `named`: `enum` and `required` have places of their own (Nemotron 3); without it
    they stand among the other keys of a schema (Qwen3-Coder)."""
    return "".join(_function(tool.get("function", tool), named) for tool in tools)


def schema_of(tools: Tools, name: str, key: str) -> Mapping[str, Any]:
    """The JSON schema of parameter `key` of the tool `name`, references to the tool's own definitions resolved; empty
    when the tool, or the schema, says nothing of it."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            root = function.get("parameters")
            properties = root.get("properties") if isinstance(root, Mapping) else None
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            return _resolved(schema, root)
    return {}


def members_of(name: str, arguments: Any) -> dict[str, tuple[Any, str]]:
    if isinstance(arguments, Mapping):
        return {str(key): (value, json.dumps(value, ensure_ascii=False)) for key, value in arguments.items()}
    text = arguments or "{}"
    try:
        members, end = read_object(text, 0)
    except (ValueError, TypeError) as error:
        raise ValueError(f"arguments of the tool call {name!r}: expected a JSON object, found {text!r:.200}") from error
    if text[end:].strip():
        raise ValueError(f"arguments of the tool call {name!r}: {text[end:]!r:.80} stands behind the JSON object")
    return members


def json_of(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON of a value: as it is spelled where the schema means JSON, as a text otherwise."""
    types = _types(schema)
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        value, end = read_json(bare)
    except ValueError:
        value, end = text, -1
    takes_text = not types or "string" in types
    nested = (isinstance(value, list) and "array" in types) or (isinstance(value, dict) and "object" in types)
    means_json = not takes_text or nested or (value is None and "null" in types)
    if end == len(bare) and means_json and not isinstance(value, str):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """JSON types that the schema allows; empty when it does not say."""
    given = schema.get("type")
    found = {given} if isinstance(given, str) else {t for t in given if isinstance(t, str)} if given else set()
    for keyword in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(keyword) or ():
            found |= _types(option) if isinstance(option, Mapping) else set()
    return found


def _resolved(schema: Any, root: Any, depth: int = 0) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping) or depth > _REFERENCES:
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for part in reference[2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return _resolved(target, root, depth + 1)
    options = {
        keyword: [_resolved(option, root, depth + 1) for option in schema[keyword]]
        for keyword in ("anyOf", "oneOf", "allOf")
        if isinstance(schema.get(keyword), list)
    }
    return {**schema, **options}


def _function(function: Mapping[str, Any], named: bool) -> str:
    out = f"\n<function>\n<name>{function.get('name', '')}</name>"
    if "description" in function:
        out += f"\n<description>{str(function['description']).strip()}</description>"
    out += "\n<parameters>"
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for key, fields in properties.items() if isinstance(properties, Mapping) else ():
        out += f"\n<parameter>\n<name>{key}</name>"
        if isinstance(fields, Mapping):
            if "type" in fields:
                out += f"\n<type>{fields['type']}</type>"
            if "description" in fields:
                out += f"\n<description>{str(fields['description']).strip()}</description>"
            if named and "enum" in fields:
                out += f"\n<enum>{json.dumps(fields['enum'], ensure_ascii=False)}</enum>"
            out += _extra(fields, ("name", "type", "description", *(("enum",) if named else ())))
        out += "\n</parameter>"
    if isinstance(parameters, Mapping):
        out += _extra(parameters, ("type", "properties", *(("required",) if named else ())))
        if named and "required" in parameters:
            out += f"\n<required>{json.dumps(parameters['required'], ensure_ascii=False)}</required>"
    return f"{out}\n</parameters>{_extra(function, ('type', 'name', 'description', 'parameters'))}\n</function>"


def _extra(fields: Mapping[str, Any], handled: tuple[str, ...]) -> str:
    return "".join(
        f"\n<{key}>{json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value}</{key}>"
        for key, value in fields.items()
        if key not in handled
    )
