"""The session server's own description, OpenAPI 3.1, as `GET /openapi.json` answers it.

It says what every path takes and may answer. Bodies of the dialects are described as far as this server reads them: the
formats are those of OpenAI, Anthropic and vLLM, and fields that are not named here are ignored or refused with 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.tito.export import PICKERS

__all__ = ["openapi_document"]

Json = dict[str, Any]

_ERRORS = {
    400: "The request cannot be answered, or the session has no room left",
    401: "No token, or one that nobody has",
    403: "Another session's token",
    404: "The session has ended, expired or never was",
    409: "The turn contradicts the session, or another one is under way",
    413: "The body is too large",
    502: "The engine failed",
    503: "The engine is unavailable",
}
_TEXT: Json = {"type": ["string", "null"]}
_EVENT: Json = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "description": "One server-sent event; the stream is a sequence of them",
}
_COUNT: Json = {"type": "integer", "minimum": 0}
_SAMPLING: Json = {
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 100},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": -1, "maximum": 2147483647},
    "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
}
_LIMIT: Json = {"type": ["integer", "null"], "minimum": 1}
_STOP: Json = {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}}
_MODEL_AND_STREAM: Json = {"model": _TEXT, "stream": {"type": ["boolean", "null"]}}
_TOOLS: Json = {"type": ["array", "null"], "items": {"type": "object"}}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}}


def _object(properties: Json, required: tuple[str, ...] = (), **more: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _blocks(*kinds: str) -> Json:
    """Content as a string, or as a list of blocks of these types."""
    block = _object({"type": {"enum": list(kinds)}, "text": {"type": "string"}}, ("type",))
    return {"oneOf": [{"type": "string"}, {"type": "array", "items": block}]}


_CALL = _object({"id": _TEXT, "function": _object({"name": {"type": "string"}, "arguments": _TEXT}, ("name",))})
_CHAT = _object(
    {
        **_MODEL_AND_STREAM,
        **_SAMPLING,
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": _object(
                {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": {"oneOf": [{"type": "null"}, *_blocks("text")["oneOf"]]},
                    "reasoning_content": _TEXT,
                    "tool_calls": {"type": ["array", "null"], "items": {**_CALL, "required": ["function"]}},
                    "tool_call_id": _TEXT,
                },
                ("role",),
            ),
        },
        "tools": {
            "type": ["array", "null"],
            "items": _object({"function": _object({"name": {"type": "string"}}, ("name",))}, ("function",)),
        },
        "stream_options": {"type": ["object", "null"]},
        "max_tokens": _LIMIT,
        "max_completion_tokens": _LIMIT,
        "stop": {"oneOf": [{"type": "string", "minLength": 1}, _STOP]},
        "n": {"enum": [1, None]},
    },
    ("messages",),
)
_RESPONSES = _object(
    {
        **_MODEL_AND_STREAM,
        **_SAMPLING,
        "input": {
            "oneOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": _object(
                        {
                            "type": {"enum": ["message", "reasoning", "function_call", "function_call_output"]},
                            "role": {"enum": ["user", "assistant", "system", "developer"]},
                            "content": _blocks("input_text", "output_text"),
                            "call_id": _TEXT,
                            "name": {"type": "string"},
                            "arguments": {"type": "string"},
                            "output": _blocks("input_text"),
                        }
                    ),
                },
            ]
        },
        "instructions": _TEXT,
        "previous_response_id": _TEXT,
        "tools": _TOOLS,
        "max_output_tokens": _LIMIT,
    },
    ("input",),
)
_PROMPT = {
    **_MODEL_AND_STREAM,
    **_SAMPLING,
    "messages": {
        "type": "array",
        "items": _object(
            {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": _blocks("text", "thinking", "tool_use", "tool_result"),
            },
            ("role", "content"),
        ),
    },
    "system": {"oneOf": [{"type": "null"}, *_blocks("text")["oneOf"]]},
    "tools": {"type": ["array", "null"], "items": _object({"name": {"type": "string"}, "input_schema": {}})},
    "stop_sequences": _STOP,
}
_MESSAGES = _object({**_PROMPT, "max_tokens": {"type": "integer", "minimum": 1}}, ("messages", "max_tokens"))
_TOKENS = _object(
    {
        "model": _TEXT,
        "token_ids": {**_IDS, "minItems": 1},
        "sampling_params": _object(
            {
                **_SAMPLING,
                "max_tokens": _LIMIT,
                "stop": {"oneOf": [{"type": "string", "minLength": 1}, _STOP]},
                "stop_token_ids": _IDS,
                "n": {"enum": [1, None]},
            }
        ),
    },
    ("token_ids",),
)
_EXPORT = _object(
    {
        "leaves": {"enum": [*PICKERS, None]},
        "prompt_id": _TEXT,
        "group_id": _TEXT,
        "episode_id": _TEXT,
        "max_tokens": {"type": ["integer", "null"]},
    }
)

_ERROR = _object({"error": _object({"message": {"type": "string", "minLength": 1}}, ("message",))}, ("error",))
_CHOICE = _object(
    {
        "token_ids": _IDS,
        "versions": {"type": "array", "items": {"type": "integer"}},
        "logprobs": _object({"content": {"type": "array", "items": {"type": "object"}}}, ("content",)),
        "finish_reason": {"enum": ["stop", "length"]},
    },
    ("token_ids", "versions", "logprobs", "finish_reason"),
)
_OPENED = _object({name: {"type": "string"} for name in ("id", "token", "base_url")}, ("id", "token", "base_url"))
_STATE = _object(
    {
        "id": {"type": "string"},
        "mode": {"enum": ["linear", "branching"]},
        "full": {"type": "boolean"},
        "created": {"type": "number"},
        **dict.fromkeys(("turns", "tokens", "leaves", "running", "prompt_tokens", "cached_tokens"), _COUNT),
    },
    ("id", "turns", "tokens", "running"),
)


def _list_of(name: str, kind: str) -> Json:
    return _object({"object": {"const": kind}, name: {"type": "array", "minItems": 1}}, ("object", name))


_TURNS: dict[str, tuple[str, Json, Json]] = {
    "v1/chat/completions": ("OpenAI Chat Completions", _CHAT, _list_of("choices", "chat.completion")),
    "v1/responses": (
        "OpenAI Responses",
        _RESPONSES,
        _object({"object": {"const": "response"}, "output": {"type": "array"}}, ("object", "output")),
    ),
    "v1/messages": (
        "Anthropic Messages",
        _MESSAGES,
        _object({"type": {"const": "message"}, "content": {"type": "array"}}, ("type", "content", "stop_reason")),
    ),
    "inference/v1/generate": (
        "Tokens in, tokens out, as vLLM has it",
        _TOKENS,
        _object({"choices": {"type": "array", "items": _CHOICE, "minItems": 1}}, ("request_id", "choices")),
    ),
}
"""Summary, body and answer of the paths that sample a turn; all but the last stream on request."""


def _content(schema: Json, media: str = "application/json") -> Json:
    return {media: {"schema": schema}}


def _operation(summary: str, ok: Json, errors: tuple[int, ...], *, body: Json | None = None, status: int = 200) -> Json:
    """One operation: `ok` is the content of its good answer."""
    answers = {str(status): {"description": "As asked", "content": ok}}
    for code in errors:
        answers[str(code)] = {"description": _ERRORS[code], "content": _content({"$ref": "#/components/schemas/Error"})}
    operation: Json = {"summary": summary, "responses": answers}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content(body)}
    return operation


def _of_session() -> dict[str, Json]:
    """What is below a session, by path: `/sessions/ID/` stands before it, or the header `X-Session-ID` names the
    session."""
    reading = (401, 403, 404)
    paths: dict[str, Json] = {}
    for tail, (summary, body, answer) in _TURNS.items():
        ok = _content(answer)
        if tail != "inference/v1/generate":
            ok |= _content(_EVENT, "text/event-stream")
        paths[tail] = {"post": _operation(summary, ok, tuple(_ERRORS), body=body)}
    counted = _content(_object({"input_tokens": _COUNT}, ("input_tokens",)))
    paths["v1/messages/count_tokens"] = {
        "post": _operation("Tokens of a prompt", counted, (400, *reading, 413), body=_object(_PROMPT, ("messages",)))
    }
    paths["v1/models"] = {"get": _operation("The policy", _content(_list_of("data", "list")), reading)}
    return paths


def openapi_document(version: str, *, opens: bool) -> Mapping[str, Any]:
    """The document. `version` is that of the package; `opens`: sessions are opened over HTTP."""
    by_path = {"name": "session", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    by_header = {**by_path, "name": "X-Session-ID", "in": "header"}
    reading = (401, 403, 404)
    health = _content(_object({"status": {"const": "ok"}, "sessions": _COUNT}, ("status", "sessions")))
    gone = _content(_object({"id": {"type": "string"}, "deleted": {"const": True}}, ("id", "deleted")))
    arrow = {"application/vnd.apache.arrow.stream": {"schema": {"type": "string", "format": "binary"}}}
    session = {
        "get": _operation("State of a session", _content(_STATE), reading),
        "delete": _operation("End a session", gone, reading),
    }
    paths: dict[str, Json] = {
        "/health": {"get": {**_operation("Whether it serves", health, ()), "security": []}},
        "/openapi.json": {"get": {**_operation("This document", _content({"type": "object"}), ()), "security": []}},
        "/sessions/{session}": {"parameters": [by_path], **session},
        "/sessions/{session}/export": {
            "parameters": [by_path],
            "post": _operation("Trajectories, one Arrow IPC stream", arrow, (400, *reading, 413), body=_EXPORT),
        },
    }
    if opens:
        opening = _operation("Open a session", _content(_OPENED), (400, 401, 403, 413), body=_object({}), status=201)
        paths["/sessions"] = {"post": opening}
    for tail, item in _of_session().items():
        paths[f"/sessions/{{session}}/{tail}"] = {"parameters": [by_path], **item}
        paths[f"/{tail}"] = {"parameters": [by_header], **item}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "A session's token, or the admin token"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "miles-core session server", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}, "securitySchemes": schemes},
        "security": [{"bearer": []}, {"key": []}],
    }
