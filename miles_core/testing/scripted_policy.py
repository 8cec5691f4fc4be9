"""A policy that follows a script: it reads its prompt as text, and a function of it decides the next reply.

Real agents can be driven with it through a whole task: the function sees the tools that the agent offers and what they
returned, and calls the next one as a ChatML model with Hermes tool calls would.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from miles_core.contracts.families import Tokenizer
from miles_core.testing.stub_engine import Script

__all__ = ["ReadPrompt", "read_prompt", "scripted_policy", "tool_call"]

_BLOCK = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadPrompt:
    """A prompt as text: its messages as (role, text) in order, a run of tool results as one of the user's; the tools on
    offer by name, with their JSON Schemas; and what tools returned so far, in order."""

    messages: tuple[tuple[str, str], ...]
    tools: dict[str, dict[str, Any]]
    results: tuple[str, ...]


def read_prompt(text: str) -> ReadPrompt:
    """Read a ChatML prompt that ends where the assistant's reply begins."""
    messages = tuple((match[1], match[2]) for match in _BLOCK.finditer(text))
    system = messages[0][1] if messages and messages[0][0] == "system" else ""
    offered = [json.loads(line)["function"] for listed in _TOOLS.findall(system)[-1:] for line in listed.splitlines()]
    return ReadPrompt(
        messages=messages,
        tools={tool["name"]: tool.get("parameters", {}) for tool in offered},
        results=tuple(found for role, said in messages if role == "user" for found in _RESULT.findall(said)),
    )


def scripted_policy(tokenizer: Tokenizer, reply: Callable[[ReadPrompt], str]) -> Script:
    """The script of a `StubEngine` that says `reply(prompt)` and ends its turn."""

    def script(input_ids: Sequence[int], params: dict[str, Any]) -> Sequence[int]:
        return [*tokenizer.encode(reply(read_prompt(tokenizer.decode(input_ids)))), tokenizer.special("<|im_end|>")]

    return script


def tool_call(name: str, **arguments: Any) -> str:
    """A Hermes tool call, its arguments spelled as no client would spell them again (keys backwards, wide)."""
    written = json.dumps(dict(reversed(arguments.items())), separators=(" , ", " : "), ensure_ascii=True)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {written}}}\n</tool_call>'
