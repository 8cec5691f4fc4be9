"""OpenAI Responses (`/v1/responses`), as the `openai` SDK 3 speaks it.

Items become messages: reasoning, text and function calls in a row are one assistant message. `previous_response_id`
continues from that response's turn. Tools are those of `response_tools`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.tito.dialects.base import (
    event,
    expect,
    get,
    limit,
    no_constraint,
    numbers,
    optional,
    refuse_fields,
    stop_strings,
    text_blocks,
)
from miles_core.tito.dialects.response_tools import ClientTool, call_of_item, item_of_call, read_tools
from miles_core.tito.turns import BadRequestError, Reply, TurnRequest

__all__ = ["ResponsesDialect"]

_REFUSED: dict[str, Any] = {
    "input_ids": None,
    "logit_bias": None,
    "prompt": None,
    "conversation": None,
    "background": False,
}
_TEXT = ("input_text", "output_text", "text")
_CALLS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""Items that call a tool: the field with the call's text, and the events that stream it."""


class ResponsesDialect:
    """See `Dialect`."""

    late = False

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """See `Dialect.read`."""
        refuse_fields(body, _REFUSED)
        text = get(body, "text", dict, {})
        refuse_fields({"text.format": text.get("format")}, {"text.format": {"type": "text"}})
        tools, known = read_tools(get(body, "tools", list, []))
        no_constraint(body.get("tool_choice"), "tool_choice", ("auto",), offered=bool(tools))
        instructions = optional(body, "instructions", str)
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else expect(given, list, "input")
        messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
        messages += _messages(items)
        previous = optional(body, "previous_response_id", str)
        return TurnRequest(
            messages=messages,
            model=get(body, "model", str, ""),
            tools=tools,
            stream=get(body, "stream", bool, False),
            max_tokens=limit(body, "max_output_tokens"),
            stop=stop_strings(body.get("stop"), "stop"),
            previous=None if previous is None else previous.removeprefix("resp_"),
            extra={
                "instructions": instructions,
                "tools": body.get("tools") or [],
                "known": known,
                "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
                "metadata": body.get("metadata") or {},
                "previous_response_id": previous,
            },
            **numbers(body),
        )

    def answer(self, request: TurnRequest, reply: Reply) -> Mapping[str, Any]:
        """See `Dialect.answer`."""
        cut = reply.finish_reason == "length"
        return {
            **_head(request, "incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(_items(reply, request.extra["known"])),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def stream(self, request: TurnRequest) -> ResponsesStream:
        return ResponsesStream(request)

    def error(self, status: int, message: str, code: str) -> Mapping[str, Any]:
        """See `Dialect.error`."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ResponsesStream:
    """`response.*` events, numbered. Items are opened as their text comes, and the last event holds the whole."""

    def __init__(self, request: TurnRequest) -> None:
        self._request = request
        self._number = 0
        self._open: tuple[str, str] | None = None
        self._said = ""
        self._items: list[Mapping[str, Any]] = []

    def start(self) -> bytes:
        head = _head(self._request, "in_progress")
        return self._event("response.created", response=head) + self._event("response.in_progress", response=head)

    def delta(self, reasoning: str, content: str) -> bytes:
        """Text deltas, in an item of their own kind."""
        out = b""
        for kind, text in (("reasoning", reasoning), ("message", content)):
            if text:
                out += self._enter(kind)
                self._said += text
                name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
                more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
                out += self._event(name, **self._place(), content_index=0, delta=text, **more)
        return out

    def finish(self, reply: Reply) -> bytes:
        """Tool calls, and the whole response."""
        out = self._leave()
        for item in _items(reply, self._request.extra["known"]):
            if item["type"] in _CALLS:
                out += self._call(item, *_CALLS[item["type"]])
        whole = {**ResponsesDialect().answer(self._request, reply), "output": self._items}
        name = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return out + self._event(name, response=whole)

    def error(self, status: int, message: str, code: str) -> bytes:
        return self._event("error", code=code, message=message, param=None)

    def _call(self, item: Mapping[str, Any], field: str, events: str) -> bytes:
        """A tool call, whose text is its `field`, as an item of its own."""
        place = {"item_id": item["id"], "output_index": len(self._items)}
        begun = {**item, field: "", "status": "in_progress"}
        out = self._event("response.output_item.added", output_index=len(self._items), item=begun)
        out += self._event(f"{events}.delta", **place, delta=item[field])
        out += self._event(f"{events}.done", **place, **{field: item[field]}, name=item["name"])
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return out

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open[1], "output_index": len(self._items)}

    def _enter(self, kind: str) -> bytes:
        """Close the open item unless it is of `kind`, and open one."""
        if self._open is not None and self._open[0] == kind:
            return b""
        out = self._leave()
        self._open = (kind, f"{'rs' if kind == 'reasoning' else 'msg'}_{len(self._items)}")
        begun = _reasoning(self._open[1], None) if kind == "reasoning" else _text(self._open[1], None, "in_progress")
        out += self._event("response.output_item.added", output_index=len(self._items), item=begun)
        return out + self._event("response.content_part.added", **self._place(), content_index=0, part=_part(kind, ""))

    def _leave(self) -> bytes:
        """Close the open item."""
        if self._open is None:
            return b""
        kind, name = self._open
        done = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        out = self._event(done, **self._place(), content_index=0, text=self._said, **more)
        out += self._event("response.content_part.done", **self._place(), content_index=0, part=_part(kind, self._said))
        item = _reasoning(name, self._said) if kind == "reasoning" else _text(name, self._said, "completed")
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open, self._said = None, ""
        return out


def _head(request: TurnRequest, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{request.turn_id}",
        "object": "response",
        "created_at": request.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": request.extra["instructions"],
        "max_output_tokens": request.max_tokens,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.extra["parallel_tool_calls"],
        "previous_response_id": request.extra["previous_response_id"],
        "store": True,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": request.extra["tools"],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": request.extra["metadata"],
    }


def _items(reply: Reply, known: Mapping[str, ClientTool]) -> Iterator[dict[str, Any]]:
    """The reply as output items."""
    message = reply.message
    if message.get("reasoning_content"):
        yield _reasoning("rs_0", message["reasoning_content"])
    if message.get("content"):
        yield _text(f"msg_{int(bool(message.get('reasoning_content')))}", message["content"], "completed")
    for call in message.get("tool_calls") or ():
        yield item_of_call(call, known)


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(name: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part("reasoning", text)]
    return {"type": "reasoning", "id": name, "summary": [], "content": content}


def _text(name: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part("message", text)]
    return {"type": "message", "id": name, "role": "assistant", "status": status, "content": content}


def _messages(items: list[Any]) -> Iterator[dict[str, Any]]:
    """Input items as messages."""
    reply: dict[str, Any] | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = expect(expect(item, dict, where).get("type", "message"), str, f"{where}.type")
        role = item.get("role") if kind == "message" else None
        if kind in _CALLS or kind == "reasoning" or role == "assistant":
            starts = kind == "reasoning" or (role == "assistant" and reply is not None and reply["content"])
            if reply is not None and (starts or (role == "assistant" and "tool_calls" in reply)):
                yield reply
                reply = None
            reply = reply or {"role": "assistant", "content": ""}
            _extend(reply, item, kind, where)
            continue
        if reply is not None:
            yield reply
            reply = None
        if kind in ("function_call_output", "custom_tool_call_output"):
            content = text_blocks(item.get("output"), f"{where}.output", _TEXT)
            yield {"role": "tool", "content": content, "tool_call_id": get(item, "call_id", str, "")}
        elif kind == "message" and role in ("user", "system", "developer"):
            yield {"role": role, "content": text_blocks(item.get("content"), f"{where}.content", _TEXT)}
        else:
            raise BadRequestError(
                f"{where}: an item of type {kind!r} and role {role!r} is not one that a session can hold"
            )
    if reply is not None:
        yield reply


def _extend(reply: dict[str, Any], item: Mapping[str, Any], kind: str, where: str) -> None:
    """Add an item of the assistant's to its message."""
    if kind == "reasoning":
        parts = [*get(item, "content", list, []), *get(item, "summary", list, [])]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        reply["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    elif kind in _CALLS:
        reply.setdefault("tool_calls", []).append(call_of_item(item, where))
    else:
        content = text_blocks(item.get("content"), f"{where}.content", _TEXT)
        reply["content"] = content if isinstance(content, str) else "".join(block["text"] for block in content)
