"""Qwen3: ChatML with `<think>` blocks and Hermes tool calls."""

from __future__ import annotations

import functools

from miles_core.contracts.component import Example, Workbench
from miles_core.contracts.families import Evidence
from miles_core.tito.families.chatml import ChatMLConfig
from miles_core.tito.families.thinking import ThinkBlock, Thinking, ThinkingFamily

__all__ = ["Qwen3Config", "Qwen3Family"]


class Qwen3Config(ChatMLConfig):
    """Section `[model.family]` of `qwen3`."""

    thinking: Thinking = "free"
    """How the model thinks: `free`, where it opens the block itself (Qwen3); `off`, where the prompt brings an empty
    one (Qwen3 with `enable_thinking = false`); `forced`, where the prompt opens it (Thinking 2507, Next Thinking);
    `none`, where there is no block (Instruct 2507, Next Instruct)."""


class Qwen3Family(ThinkingFamily[Qwen3Config]):
    """ChatML with thinking in four ways, and Hermes tool calls."""

    Config = Qwen3Config
    evidence: Evidence = "template-equal"

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Thinking as Qwen3 does by default."""
        return Example()

    @functools.cached_property
    def block(self) -> ThinkBlock:
        """See `ThinkingFamily.block`."""
        return ThinkBlock(thinking=self.config.thinking)
