"""OpenAI Chat Completions (`/v1/chat/completions`), as the `openai` SDK 3 speaks it.

Beyond the standard, replies carry `reasoning_content`, as other servers of reasoning models do; clients that send it
back keep their history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.tito.dialects.base import (
    event,
    expect,
    get,
    limit,
    no_constraint,
    numbers,
    one_of_one,
    optional,
    refuse_fields,
    stop_strings,
    text_blocks,
)
from miles_core.tito.history import History
from miles_core.tito.turns import BadRequestError, Reply, TurnRequest

__all__ = ["ChatDialect"]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REFUSED: dict[str, Any] = {
    "input_ids": None,
    "logit_bias": None,
    "echo": False,
    "functions": None,
    "function_call": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "prediction": None,
    "response_format": {"type": "text"},
    "guided_json": None,
    "guided_regex": None,
    "regex": None,
    "json_schema": None,
}


class ChatDialect:
    """See `Dialect`."""

    late = True

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """See `Dialect.read`."""
        refuse_fields(body, _REFUSED)
        one_of_one(body, "n", "best_of")
        tools = tuple(_tool(t, i) for i, t in enumerate(get(body, "tools", list, [])))
        no_constraint(body.get("tool_choice"), "tool_choice", ("auto",), offered=bool(tools))
        options = get(body, "stream_options", dict, {})
        return TurnRequest(
            messages=History(expect(body.get("messages"), list, "messages"), _message),
            model=get(body, "model", str, ""),
            tools=tools,
            stream=get(body, "stream", bool, False),
            include_usage=bool(options.get("include_usage")),
            max_tokens=limit(body, "max_completion_tokens", "max_tokens"),
            stop=stop_strings(body.get("stop"), "stop"),
            **numbers(body),
        )

    def answer(self, request: TurnRequest, reply: Reply) -> Mapping[str, Any]:
        """See `Dialect.answer`."""
        message = {**reply.message}
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
        return {
            "id": f"chatcmpl-{request.turn_id}",
            "object": "chat.completion",
            "created": request.created,
            "model": request.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}],
            "usage": _usage(reply),
        }

    def stream(self, request: TurnRequest) -> ChatStream:
        return ChatStream(request)

    def error(self, status: int, message: str, code: str) -> Mapping[str, Any]:
        """See `Dialect.error`."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ChatStream:
    """`chat.completion.chunk` events, closed by `[DONE]`."""

    def __init__(self, request: TurnRequest) -> None:
        self._request = request

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, reasoning: str, content: str) -> bytes:
        fields = {"reasoning_content": reasoning, "content": content}
        return self._chunk({name: text for name, text in fields.items() if text})

    def finish(self, reply: Reply) -> bytes:
        """Tool calls, the reason, and usage when it was asked for."""
        out = b""
        for index, call in enumerate(reply.message.get("tool_calls") or ()):
            function = call["function"]
            head = {"name": function["name"], "arguments": ""}
            out += self._chunk(
                {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": head}]}
            )
            out += self._chunk({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
        out += self._chunk({}, finish_reason=reply.finish_reason)
        if self._request.include_usage:
            out += event({**self._head(), "choices": [], "usage": _usage(reply)})
        return out + b"data: [DONE]\n\n"

    def error(self, status: int, message: str, code: str) -> bytes:
        return event(ChatDialect().error(status, message, code))

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._request.turn_id}",
            "object": "chat.completion.chunk",
            "created": self._request.created,
            "model": self._request.model,
        }

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head(), "choices": [choice]})


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _message(message: Any, index: int) -> Mapping[str, Any]:
    """A message as families read it. Most need no change: a history is read again with every turn."""
    if type(message) is dict and len(message) == 2 and type(message.get("content")) is str and _is_plain(message):
        return message
    where = f"messages[{index}]"
    given: Mapping[str, Any] = expect(message, dict, where)
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequestError(f"{where}.role: {role!r}; allowed: {', '.join(sorted(_ROLES))}")
    content = message.get("content")
    changed = {
        "role": role,
        "content": content if isinstance(content, str) else text_blocks(content, f"{where}.content"),
    }
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            changed[key] = expect(message[key], str, f"{where}.{key}")
    if role == "assistant":
        reasoning = optional(message, "reasoning_content", str) or optional(message, "reasoning", str)
        if reasoning:
            changed["reasoning_content"] = reasoning
        calls = get(message, "tool_calls", list, [])
        if calls:
            changed["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return changed


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("user", "assistant", "system")


def _call(call: Any, where: str) -> dict[str, Any]:
    function = expect(expect(call, dict, where).get("function"), dict, f"{where}.function")
    name = expect(function.get("name"), str, f"{where}.function.name")
    arguments = get(function, "arguments", str, "{}")
    return {"id": get(call, "id", str, ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Any, index: int) -> Mapping[str, Any]:
    where = f"tools[{index}]"
    given: Mapping[str, Any] = expect(tool, dict, where)
    function = expect(given.get("function"), dict, f"{where}.function")
    expect(function.get("name"), str, f"{where}.function.name")
    return given
