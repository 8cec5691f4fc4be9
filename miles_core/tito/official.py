"""The official chat template as an oracle: what it says of a conversation, where it says one thing only."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.tito.families.template import compile_template

__all__ = ["OfficialTemplate"]

Messages = Sequence[Mapping[str, Any]]

_TAGS = ("<think>", "</think>")
_QUESTION = {"role": "user", "content": "q"}
_EMPTY_BLOCK = "<think>\n\n</think>\n\n"


class OfficialTemplate:
    """A Jinja chat template with its further variables (`enable_thinking = false`).

    Tool-call arguments go in as objects, as transformers documents it.
    """

    def __init__(self, source: str, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._template = compile_template(source, name)
        self._arguments = {"bos_token": "", "eos_token": "", **(arguments or {})}

    def text(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, generate: bool) -> str:
        """The rendering. Raises `ValueError` when the template refuses the conversation."""
        import jinja2

        try:
            text: str = self._template.render(
                messages=[_as_objects(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=generate,
                **self._arguments,
            )
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"the template refuses the conversation: {error}") from error
        return text

    def whole(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """The conversation up to the next generation prompt, None where the template cannot be held to it: where it
        refuses, is not append-only, or rewrites what an assistant said (strips it, looks for tags in it, spells its
        arguments another way)."""
        if not all(self._keeps(m) if m["role"] == "assistant" else self._shows(m["role"]) for m in messages):
            return None
        try:
            whole = self.text(messages, tools, generate=True)
            for at, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                if not whole.startswith(self.text(messages[:at], tools, generate=True)):
                    return None
                said = self.text(messages[: at + 1], tools, generate=False)
                # Some templates write an empty block in the last answer alone, where it says nothing.
                plain = said if message.get("reasoning_content") else said.replace(_EMPTY_BLOCK, "")
                if not whole.startswith(said) and not whole.startswith(plain):
                    return None
        except ValueError:
            return None
        return whole

    def _keeps(self, message: Mapping[str, Any]) -> bool:
        content, reasoning = message.get("content") or "", message.get("reasoning_content")
        if reasoning == "" or any(tag in text for tag in _TAGS for text in (content, reasoning or "")):
            return False
        if self._strips and any(text != text.strip() for text in (content, reasoning or "")):
            return False
        return all(_canonical(call["function"]["arguments"]) for call in message.get("tool_calls") or ())

    @functools.cached_property
    def _strips(self) -> bool:
        """Whether white space around an assistant's text is lost."""
        for space in ("\n" * 5, " "):
            padded = f"{space}a{space}"
            for reply in ({"content": padded}, {"content": "b", "reasoning_content": padded}):
                text = self.text([_QUESTION, {"role": "assistant", **reply}], generate=False)
                if padded not in text and "a" in text.partition("b")[0]:
                    return True
        return False

    @functools.cache  # noqa: B019 (a handful of roles a template)
    def _shows(self, role: str) -> bool:
        """Whether what a role says is in the rendering: some templates leave out roles that they do not know."""
        try:
            return "said" in self.text([{"role": role, "content": "said"}, _QUESTION], generate=True)
        except ValueError:
            return role == "tool"


def _as_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _canonical(arguments: str) -> bool:
    return json.dumps(json.loads(arguments or "{}"), ensure_ascii=False) == (arguments or "{}")
