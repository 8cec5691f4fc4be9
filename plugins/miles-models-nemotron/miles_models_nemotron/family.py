"""Nemotron 3: ChatML with `<think>` blocks and XML tool calls.

Format: the chat templates of NVIDIA-Nemotron-3-Nano, -Super, -Ultra and 3.5-Lightning.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from miles_core.contracts.component import Example, Workbench
from miles_core.contracts.families import Evidence
from miles_core.tito.families.calls import CallFormat, Piece
from miles_core.tito.families.chatml import ChatMLConfig
from miles_core.tito.families.thinking import ThinkBlock, ThinkingFamily
from miles_core.tito.families.xml_calls import XmlCalls, function_list, tool_prompt_pieces

__all__ = ["Nemotron3Config", "Nemotron3Family"]

_EFFORTS = {("super", "low"): "low", ("ultra", "medium"): "efficient"}


class Nemotron3Config(ChatMLConfig):
    """Section `[model.family]` of `nemotron3`."""

    model: Literal["nano", "super", "ultra", "lightning"] = "nano"
    """Which official template. Nano and Super put `</think>` on a line of its own, Ultra and 3.5 Lightning do not."""
    thinking: Literal["forced", "off"] = "forced"
    """`forced`: the prompt opens the block; `off`: it brings an empty one (`enable_thinking = false`)."""
    effort: Literal["full", "medium", "low"] = "full"
    """`low` (Super) and `medium` (Ultra) end each of the user's messages with a word on the effort. The official
    templates say it in the last one alone, which later turns would change."""

    @model_validator(mode="after")
    def _effort_exists(self) -> Self:
        if self.effort != "full" and (self.model, self.effort) not in _EFFORTS:
            allowed = ", ".join(f"{effort!r} with model = {model!r}" for model, effort in _EFFORTS)
            raise ValueError(
                f"effort = {self.effort!r} with model = {self.model!r}: its template has no such effort; "
                f"allowed are 'full' and {allowed}"
            )
        return self


class Nemotron3Family(ThinkingFamily[Nemotron3Config]):
    """There is a system block always, and unknown roles keep their names."""

    Config = Nemotron3Config
    evidence: Evidence = "template-equal"
    roles: ClassVar[Mapping[str, str]] = {
        "system": "system",
        "developer": "developer",
        "user": "user",
        "assistant": "assistant",
    }

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Nano, thinking; its vocabulary has the tags as tokens."""
        return Example()

    @functools.cached_property
    def block(self) -> ThinkBlock:
        """See `ThinkingFamily.block`."""
        line = "\n" if self._own_line else ""
        return ThinkBlock(
            thinking=self.config.thinking, inside=line, behind=line, behind_alone=False, empty="", empty_behind=""
        )

    @functools.cached_property
    def calls(self) -> CallFormat:
        """See `ChatMLFamily.calls`. Calls stand on lines of their own, which a closed block may have begun already."""
        begun = self._own_line and self.config.thinking == "forced"
        return XmlCalls(before="\n", between="\n", behind="\n", always_before=not begun, python_words=True)

    def said(self, message: Mapping[str, Any], index: int) -> str:
        """See `ChatMLFamily.said`."""
        text = super().said(message, index)
        effort = _EFFORTS.get((self.config.model, self.config.effort))
        return f"{text}\n\n{{reasoning effort: {effort}}}" if effort and message.get("role") == "user" else text

    def system_pieces(self, given: str | None, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """See `ChatMLFamily.system_pieces`."""
        text = (self.config.default_system if given is None else given) or ""
        if not tools:
            return [(text, False)]
        return [(f"{text}\n\n" if text else "", False), *tool_prompt_pieces(function_list(tools, named=True))]

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

    @property
    def _own_line(self) -> bool:
        return self.config.model in ("nano", "super")
