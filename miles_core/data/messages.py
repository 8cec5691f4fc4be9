"""Chat messages as agents and environments exchange them (the OpenAI Chat Completions shape)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

__all__ = ["Function", "Message", "Role", "ToolCall", "text_of"]

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Function(TypedDict):
    """A called function: `arguments` is the JSON text exactly as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of an assistant message."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: Function


class Message(TypedDict):
    """One chat message. `reasoning_content` is the thinking part, kept apart from `content`."""

    role: Role
    content: NotRequired[str | list[dict[str, Any]] | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[Sequence[ToolCall] | None]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: its content string, or the concatenated text blocks of a content list."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if block.get("type") == "text")
