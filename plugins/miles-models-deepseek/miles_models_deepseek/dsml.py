"""DSML: the tool calls of DeepSeek V3.2 and V4, XML whose tags begin with the token `｜DSML｜`.

Format: DeepSeek's own encoders (`encoding_dsv32.py` of the V3.2 repository, the package `deepseek-recipe` for V4).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.tito.families.calls import name_of
from miles_core.tito.families.hermes import read_json
from miles_core.tito.families.marked import Piece, Token, take_calls, tool_call
from miles_core.tito.families.xml_calls import members_of

__all__ = ["DSML", "DsmlCalls"]

DSML = Token("｜DSML｜", tag=True)


class DsmlCalls:
    """Calls in a block named `tag`; `mark` is the character that stands for the token in a marked text."""

    def __init__(self, tag: str, mark: str) -> None:
        self._tag = tag
        self._mark = mark
        self._block = re.compile(f"(?:\n\n)?<{mark}{tag}>((?:(?!<{mark}{tag}>).)*?)</{mark}{tag}>", re.DOTALL)
        self._invoke = re.compile(rf'\s*<{mark}invoke name="([^"\n]+)">\s*')
        self._parameter = re.compile(
            rf'<{mark}parameter name="([^"\n]*)" string="(true|false)">([^{mark}]*)</{mark}parameter>\s*'
        )
        self._invoked = re.compile(rf"</{mark}invoke>\s*")

    def pieces(self, calls: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """The block, and the blank line in front of it."""
        out: list[Piece] = ["\n\n<", DSML, f"{self._tag}>\n"]
        for call in calls:
            name, arguments = name_of(call)
            out += ["<", DSML, f'invoke name="{name}">\n']
            for number, (key, (value, text)) in enumerate(members_of(name, arguments).items()):
                plain = isinstance(value, str)
                out += ["\n" if number else "", "<", DSML, f'parameter name="{key}" string="{str(plain).lower()}">']
                out += [value if plain else text, "</", DSML, "parameter>"]
            out += ["\n</", DSML, "invoke>\n"]
        return [*out, "</", DSML, f"{self._tag}>"]

    def take(self, text: str) -> tuple[str, list[Mapping[str, Any]], list[str]]:
        """See `take_calls`. Where the vocabulary has no token for it, a broken block beside whole ones could be read
        together with them once it is rendered again; then all of it is content."""
        content, calls, malformed = take_calls(text, self._block, lambda block: self._read(block[1]))
        return (text, [], [text]) if calls and self._mark in content else (content, calls, malformed)

    def certain(self, text: str) -> str:
        """What stays content of a text that may go on with a block."""
        return re.sub(r"\n{0,2}(?:</?)?\Z", "", text.partition(self._mark)[0])

    def _read(self, block: str) -> list[dict[str, Any]] | None:
        position, calls = 0, []
        while (invoke := self._invoke.match(block, position)) is not None:
            position = invoke.end()
            values: dict[str, str] = {}
            while (found := self._parameter.match(block, position)) is not None and found[1] not in values:
                value = json.dumps(found[3], ensure_ascii=False) if found[2] == "true" else _checked(found[3])
                if value is None:
                    return None
                values[found[1]] = value
                position = found.end()
            end = self._invoked.match(block, position)
            if end is None:
                return None
            position = end.end()
            members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
            calls.append(tool_call(invoke[1], f"{{{', '.join(members)}}}"))
        return calls if calls and not block[position:].strip() else None


def _checked(text: str) -> str | None:
    """JSON as it is spelled, None for what is none, or a string: those are written as text."""
    bare = text.strip()
    try:
        value, end = read_json(bare)
    except ValueError:
        return None
    return bare if end == len(bare) and not isinstance(value, str) else None
