"""Every family of the core in every one of its ways, each with the official template that it is held to."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.contracts.families import ModelFamily
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.families.qwen3 import Qwen3Config, Qwen3Family
from miles_core.tito.families.qwen3_5 import Qwen35Config, Qwen35Family
from miles_core.tito.families.qwen3_coder import Qwen3CoderConfig, Qwen3CoderFamily
from miles_core.tito.official import OfficialTemplate

__all__ = ["CASES", "Case", "tags_are_tokens"]

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")


@dataclasses.dataclass(frozen=True)
class Case:
    """A family in one way. `template` is a file of the trl wheel, None where it has none; `share` of the conversations
    that the family is tried on go to this way."""

    family: str
    way: str
    made: ModelFamily[Any]
    template: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    share: float = 1.0

    def official(self) -> OfficialTemplate | None:
        """The template, None without one or without trl."""
        trl = importlib.util.find_spec("trl")
        if self.template is None or trl is None or trl.origin is None:
            return None
        path = Path(trl.origin).parent / "chat_templates" / f"{self.template}.jinja"
        return OfficialTemplate(path.read_text(encoding="utf-8"), self.template, self.arguments)


def _qwen3(thinking: Any, template: str | None, arguments: Mapping[str, Any]) -> Case:
    return Case("qwen3", thinking, Qwen3Family(Qwen3Config(thinking=thinking)), template, arguments, 1 / 4)


def _qwen3_5(release: Any, thinking: Any, template: str) -> Case:
    arguments = {"enable_thinking": thinking == "forced", "preserve_thinking": True}
    family = Qwen35Family(Qwen35Config(release=release, thinking=thinking))
    return Case("qwen3_5", f"{release} {thinking}", family, template, arguments, 1 / 6)


CASES = (
    Case("chatml", "", ChatMLFamily(ChatMLConfig())),
    _qwen3("free", "qwen3", {}),
    _qwen3("off", "qwen3", {"enable_thinking": False}),
    _qwen3("forced", None, {}),
    _qwen3("none", "qwen3_instruct_2507", {}),
    _qwen3_5("3.5", "forced", "qwen3_5_think"),
    _qwen3_5("3.5", "off", "qwen3_5_nothink"),
    _qwen3_5("3.6", "forced", "qwen3_6"),
    _qwen3_5("3.6", "off", "qwen3_6"),
    _qwen3_5("3.8", "forced", "qwen3_8"),
    _qwen3_5("3.8", "off", "qwen3_8"),
    Case("qwen3_coder", "", Qwen3CoderFamily(Qwen3CoderConfig())),
)


def tags_are_tokens(directory: Path) -> FileTokenizer:
    """A small vocabulary in which the tags are tokens, as in Qwen's."""
    return load_tokenizer(write_tokenizer(directory, added=TAGS))
