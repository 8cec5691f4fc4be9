"""A small agent on LiteLLM: it has two tools, and asks until the model calls none. Runs where LiteLLM is installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import litellm

URL, KEY = os.environ["MILES_URL"], os.environ["MILES_TOKEN"]
TEXT = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {"name": "read", "description": "Read a file.", "parameters": {"type": "object", "properties": {"path": TEXT}}},
    {
        "name": "write",
        "description": "Write a file.",
        "parameters": {"type": "object", "properties": {"path": TEXT, "text": TEXT}},
    },
]


def called(name: str, arguments: str) -> str:
    """Run a tool."""
    given = json.loads(arguments)
    if name == "read":
        return Path(given["path"]).read_text()
    Path(given["path"]).write_text(given["text"])
    return "written"


def completions(task: str, *, stream: bool, provider: str) -> str:
    """`litellm.completion`: Chat Completions, or Messages by way of the provider `anthropic`."""
    base = URL if provider == "anthropic" else f"{URL}/v1"
    messages: list[Any] = [{"role": "user", "content": task}]
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    while True:
        answer = litellm.completion(
            model=f"{provider}/policy", api_base=base, api_key=KEY, messages=messages, tools=tools, stream=stream
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = called(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(task: str) -> str:
    """`litellm.responses`."""
    items: list[Any] = [{"role": "user", "content": task}]
    tools = [{"type": "function", **tool} for tool in TOOLS]
    while True:
        answer = litellm.responses(model="openai/policy", api_base=f"{URL}/v1", api_key=KEY, input=items, tools=tools)
        output = [item if isinstance(item, dict) else item.model_dump() for item in answer.output]
        items += output
        calls = [item for item in output if item["type"] == "function_call"]
        if not calls:
            return output[-1]["content"][0]["text"]
        for call in calls:
            result = called(call["name"], call["arguments"])
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})


if __name__ == "__main__":
    mode, task = sys.argv[1:]
    if mode == "responses":
        print(responses(task))
    else:
        provider = "anthropic" if mode == "messages" else "openai"
        print(completions(task, stream=mode == "chat", provider=provider))
