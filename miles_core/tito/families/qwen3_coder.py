"""Qwen3-Coder: ChatML with XML tool calls, no thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.contracts.families import Evidence
from miles_core.tito.families.calls import CallFormat, Piece
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.families.xml_calls import XmlCalls, function_list, tool_prompt_pieces

__all__ = ["Qwen3CoderConfig", "Qwen3CoderFamily"]

_WITH_TOOLS = "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."
_CALLS = XmlCalls(python_words=True)


class Qwen3CoderConfig(ChatMLConfig):
    """Section `[model.family]` of `qwen3_coder`."""

    tools_system: str = _WITH_TOOLS
    """System prompt of a conversation that offers tools and brings no prompt of its own."""


class Qwen3CoderFamily(ChatMLFamily[Qwen3CoderConfig]):
    """Tools are listed as XML, a tool result ends with a newline, and calls are XML."""

    Config = Qwen3CoderConfig
    evidence: Evidence = "verified"

    @property
    def calls(self) -> CallFormat:
        """See `ChatMLFamily.calls`."""
        return _CALLS

    def system_pieces(self, given: str | None, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """See `ChatMLFamily.system_pieces`."""
        text = self.config.default_system if given is None else given
        if not tools:
            return [] if text is None else [(text, False)]
        text = self.config.tools_system if text is None else text
        return [(f"{text}\n\n", False), *tool_prompt_pieces(function_list(tools, named=False))]

    def result_pieces(self, text: str, *, first: bool) -> list[Piece]:
        """See `ChatMLFamily.result_pieces`."""
        lead = "\n" if first else ""
        return [
            (lead, False),
            ("<tool_response>", True),
            (f"\n{text}\n", False),
            ("</tool_response>", True),
            ("\n", False),
        ]
