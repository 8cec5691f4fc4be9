"""Anthropic Messages (`/v1/messages` and `/v1/messages/count_tokens`), version 2023-06-01.

Tool input travels as an object here, so clients write it in their own spelling: sessions of such clients need the
matcher `tool_arguments`. Server tools, which the provider would run, are not offered to the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from miles_core.tito.dialects.base import (
    event,
    expect,
    get,
    limit,
    no_constraint,
    numbers,
    refuse_fields,
    stop_strings,
    text_blocks,
)
from miles_core.tito.turns import BadRequestError, Reply, TurnRequest

__all__ = ["AnthropicDialect"]

_REFUSED: dict[str, Any] = {"input_ids": None, "logit_bias": None, "output_format": None}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class AnthropicDialect:
    """See `Dialect`."""

    late = False

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """See `Dialect.read`."""
        if body.get("max_tokens") is None:
            raise BadRequestError("max_tokens: Field required")
        return self.read_prompt(body)

    def read_prompt(self, body: Mapping[str, Any]) -> TurnRequest:
        """As `read`, without a limit: what `count_tokens` gets."""
        refuse_fields(body, _REFUSED)
        output = get(body, "output_config", dict, {})
        refuse_fields({"output_config.format": output.get("format")}, {"output_config.format": None})
        tools = tuple(tool for i, t in enumerate(get(body, "tools", list, [])) for tool in _tools(t, i))
        no_constraint(body.get("tool_choice"), "tool_choice", ("auto",), offered=bool(tools))
        system = text_blocks(body.get("system"), "system")
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(expect(body.get("messages"), list, "messages")):
            messages += _messages(message, f"messages[{index}]")
        return TurnRequest(
            messages=messages,
            model=get(body, "model", str, ""),
            tools=tools,
            stream=get(body, "stream", bool, False),
            max_tokens=limit(body, "max_tokens"),
            stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
            **numbers(body),
        )

    def answer(self, request: TurnRequest, reply: Reply) -> Mapping[str, Any]:
        """See `Dialect.answer`."""
        return {
            **_head(request),
            "content": list(_blocks(reply.message)),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_sequence,
            "usage": _usage(reply),
        }

    def stream(self, request: TurnRequest) -> AnthropicStream:
        return AnthropicStream(request)

    def error(self, status: int, message: str, code: str) -> Mapping[str, Any]:
        """See `Dialect.error`."""
        return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}


class AnthropicStream:
    """`message_start`, one group of `content_block_*` events a block, `message_delta`, `message_stop`."""

    def __init__(self, request: TurnRequest) -> None:
        self._request = request
        self._index = -1
        self._open = ""

    def start(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        message = {
            **_head(self._request),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def delta(self, reasoning: str, content: str) -> bytes:
        """Text deltas, in a block of their own kind."""
        out = b""
        for kind, text in (("thinking", reasoning), ("text", content)):
            if text:
                if self._open != kind:
                    empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
                    out += self._leave() + self._enter(kind, empty)
                out += self._delta({"type": f"{kind}_delta", kind: text})
        return out

    def finish(self, reply: Reply) -> bytes:
        """Tool calls, usage and the reason why it stopped."""
        out = self._leave()
        for call in reply.message.get("tool_calls") or ():
            function = call["function"]
            begun = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            out += self._enter("tool_use", begun)
            out += self._delta({"type": "input_json_delta", "partial_json": function["arguments"]}) + self._leave()
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence}
        out += event({"type": "message_delta", "delta": delta, "usage": _usage(reply)}, "message_delta")
        return out + event({"type": "message_stop"}, "message_stop")

    def error(self, status: int, message: str, code: str) -> bytes:
        return event(AnthropicDialect().error(status, message, code), "error")

    def _enter(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        return event(begun, "content_block_start")

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        out = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return out + event({"type": "content_block_stop", "index": self._index}, "content_block_stop")


_SIGNATURE = "miles"
"""Clients send thinking blocks back with their signature; a session knows its own by what they say."""


def _head(request: TurnRequest) -> dict[str, Any]:
    return {"id": f"msg_{request.turn_id}", "type": "message", "role": "assistant", "model": request.model}


def _stop_reason(reply: Reply) -> str:
    if reply.stop_sequence is not None and reply.finish_reason == "stop":
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish_reason]


def _usage(reply: Reply) -> dict[str, int]:
    """Anthropic counts cached tokens beside the others, not among them."""
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
    }


def _blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": _SIGNATURE}
    if message.get("content"):
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        written = orjson.Fragment(function["arguments"].encode())  # as the model wrote it: no number is rounded
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": written}


def _messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """One message as Chat Completions messages: tool results come first, each a message of its own."""
    role = expect(message, dict, where).get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequestError(f"{where}.role: {role!r}; allowed: user, assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = expect(content, list, f"{where}.content")
    if role == "assistant":
        yield _assistant(blocks, where)
        return
    rest = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if expect(block, dict, place).get("type") == "tool_result":
            result = text_blocks(block.get("content"), f"{place}.content")
            yield {"role": "tool", "content": result, "tool_call_id": get(block, "tool_use_id", str, "")}
        else:
            rest.append(block)
    if rest or not blocks:
        yield {"role": role, "content": text_blocks(rest, f"{where}.content")}


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    text, reasoning, calls = "", "", []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        kind = expect(block, dict, place).get("type")
        if kind == "text":
            text += expect(block.get("text"), str, f"{place}.text")
        elif kind == "thinking":
            reasoning += expect(block.get("thinking"), str, f"{place}.thinking")
        elif kind == "tool_use":
            function = {
                "name": expect(block.get("name"), str, f"{place}.name"),
                "arguments": orjson.dumps(expect(block.get("input"), dict, f"{place}.input")).decode(),
            }
            calls.append({"id": get(block, "id", str, ""), "type": "function", "function": function})
        else:
            raise BadRequestError(f"{place}: a block of type {kind!r}; allowed: text, thinking, tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(tool: Any, index: int) -> Iterator[dict[str, Any]]:
    """A tool in the Chat Completions shape; server tools, which have no schema, give none."""
    where = f"tools[{index}]"
    if expect(tool, dict, where).get("type") not in (None, "custom"):
        return
    function: dict[str, Any] = {"name": expect(tool.get("name"), str, f"{where}.name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = expect(tool.get("input_schema"), dict, f"{where}.input_schema")
    yield {"type": "function", "function": function}
