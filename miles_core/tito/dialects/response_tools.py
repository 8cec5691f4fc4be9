"""Tools of the Responses dialect that the client runs: functions, custom tools, and namespaces of both.

The policy is offered one list of functions. A tool of a namespace is `NAMESPACE__NAME` there; a custom tool, whose
input is free text, is a function with the one argument `input`. Calls go back to the client in its own shape. Tools
that the provider would run, or whose schema it alone knows, are not offered.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.tito.dialects.base import expect, get
from miles_core.tito.turns import BadRequestError

__all__ = ["ClientTool", "call_of_item", "item_of_call", "read_tools"]

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientTool:
    """How the client knows a tool: `namespace` None outside of any, `custom` when its input is free text."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def offered_name(self) -> str:
        """What the policy calls it."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


def read_tools(given: list[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, ClientTool]]:
    """The tools as Chat Completions objects, and by the names that the policy knows how the client knows them.

    Raises `BadRequestError` for two different tools that the policy could not tell apart.
    """
    offered: list[dict[str, Any]] = []
    known: dict[str, ClientTool] = {}
    for tool, schema in _flat(given, None, "tools"):
        name = tool.offered_name
        if known.setdefault(name, tool) != tool:
            raise BadRequestError(f"tools: two different tools are offered as {name!r}; rename one of them")
        offered.append({"type": "function", "function": {**schema, "name": name}})
    return tuple(offered), known


def _flat(given: list[Any], namespace: str | None, where: str) -> Iterator[tuple[ClientTool, dict[str, Any]]]:
    """Each tool that the client runs, with name, description and parameters of the function it is offered as."""
    for index, tool in enumerate(given):
        place = f"{where}[{index}]"
        kind = expect(tool, dict, place).get("type")
        if kind not in ("function", "custom", "namespace"):
            continue
        name = expect(tool.get("name"), str, f"{place}.name")
        if kind == "namespace":
            yield from _flat(expect(tool.get("tools"), list, f"{place}.tools"), name, f"{place}.tools")
            continue
        schema = {"name": name} | {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
        if kind == "custom":
            schema |= {"description": _description(tool), "parameters": _INPUT}
        yield ClientTool(name=name, namespace=namespace, custom=kind == "custom"), schema


def _description(tool: Mapping[str, Any]) -> str:
    """A custom tool's description, with the grammar that its input must follow: the policy has to write it unaided."""
    text = get(tool, "description", str, "")
    form = get(tool, "format", dict, {})
    if form.get("type") == "grammar":
        text += f"\n\nThe input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return text


def item_of_call(call: Mapping[str, Any], known: Mapping[str, ClientTool]) -> dict[str, Any]:
    """A tool call as an output item. A custom tool's call that has other arguments than a text `input` stays a function
    call, as the policy wrote it: the client says what is wrong with it, and its history keeps what was sampled."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = known.get(name, ClientTool(name=name))
    space = {} if tool.namespace is None else {"namespace": tool.namespace}
    text = _input(arguments) if tool.custom else None
    if text is not None:
        item = {"type": "custom_tool_call", "id": f"ctc_{call['id']}", "input": text}
    else:
        item = {"type": "function_call", "id": f"fc_{call['id']}", "arguments": arguments}
    return {**item, "call_id": call["id"], "name": tool.name, **space, "status": "completed"}


def call_of_item(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An item `function_call` or `custom_tool_call` of the history as a tool call, under the policy's name for it."""
    custom = item.get("type") == "custom_tool_call"
    name = expect(item.get("name"), str, f"{where}.name")
    tool = ClientTool(name=name, namespace=get(item, "namespace", str, "") or None)
    if custom:
        arguments = json.dumps({"input": expect(item.get("input"), str, f"{where}.input")}, ensure_ascii=False)
    else:
        arguments = expect(item.get("arguments"), str, f"{where}.arguments")
    function = {"name": tool.offered_name, "arguments": arguments}
    return {"id": get(item, "call_id", str, ""), "type": "function", "function": function}


def _input(arguments: str) -> str | None:
    """The text of a custom tool's call; None when the arguments are anything else, or the text is none that UTF-8 can
    carry (half a surrogate pair)."""
    read = json.loads(arguments)
    text = read["input"] if read.keys() == {"input"} else None
    return text if isinstance(text, str) and not re.search("[\ud800-\udfff]", text) else None
