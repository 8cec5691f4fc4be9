"""Qwen3.5, 3.6 and 3.8: ChatML with `<think>` blocks that the prompt opens, and XML tool calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from miles_core.contracts.families import Evidence
from miles_core.tito.families.calls import CallFormat, Piece
from miles_core.tito.families.chatml import ChatMLConfig
from miles_core.tito.families.thinking import ThinkBlock, ThinkingFamily
from miles_core.tito.families.xml_calls import XmlCalls, tool_prompt_pieces

__all__ = ["Qwen35Config", "Qwen35Family"]

_EFFORTS = {
    "xhigh": "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, "
    "consider plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer.",
    "medium": "",
    "low": "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion "
    "without unnecessary elaboration.",
}


class Qwen35Config(ChatMLConfig):
    """Section `[model.family]` of `qwen3_5`."""

    release: Literal["3.5", "3.6", "3.8"] = "3.5"
    """Which official template: 3.5 writes an argument that is true, false or null as Python does (`True`), the later
    ones as JSON; 3.8 states the reasoning effort in the system prompt."""
    thinking: Literal["forced", "off"] = "forced"
    """`forced`: the prompt opens the block; `off`: it brings an empty one (`enable_thinking = false`, which is the
    default of the small 3.5 models)."""
    effort: Literal["xhigh", "medium", "low"] = "xhigh"
    """Reasoning effort of release 3.8; `medium` says nothing. Without effect elsewhere, and without thinking."""


class Qwen35Family(ThinkingFamily[Qwen35Config]):
    """As the official templates do, it strips white space around what system, user and tools say; what the model said
    stands as it was sampled."""

    Config = Qwen35Config
    evidence: Evidence = "template-equal"

    @functools.cached_property
    def block(self) -> ThinkBlock:
        """See `ThinkingFamily.block`."""
        return ThinkBlock(thinking=self.config.thinking)

    @functools.cached_property
    def calls(self) -> CallFormat:
        """See `ChatMLFamily.calls`."""
        return XmlCalls(python_words=self.config.release == "3.5")

    def said(self, message: Mapping[str, Any], index: int) -> str:
        """See `ChatMLFamily.said`."""
        return super().said(message, index).strip()

    def system_pieces(self, given: str | None, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """See `ChatMLFamily.system_pieces`. The tools stand in front of the prompt, the effort in front of both."""
        text = self.config.default_system if given is None else given
        states = self.config.release == "3.8" and self.config.thinking == "forced"
        effort = _EFFORTS[self.config.effort] if states else ""
        if tools:
            listing = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
            return [
                (f"{effort}\n\n" if effort else "", False),
                *tool_prompt_pieces(listing),
                (f"\n\n{text}" if text else "", False),
            ]
        if self.config.release == "3.8":
            whole = "\n\n".join(part for part in (effort, text) if part)
            return [(whole, False)] if whole else []
        return [] if text is None else [(text, False)]
