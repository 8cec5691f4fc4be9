"""What the tests of model families share: a vocabulary with a family's tokens, its laws on many conversations, and
plain conversations to hold it to another implementation."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from miles_core.contracts.families import ModelFamily
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.family_table import Row, record
from miles_core.testing.suites import FamilySuite
from miles_core.testing.tokenizers import CHATML, write_tokenizer
from miles_core.tito.families.marked import Token
from miles_core.tito.official import OfficialTemplate
from miles_core.tito.verify import Verdict, verify

__all__ = [
    "PLAIN_TOOLS",
    "FamilyLaws",
    "assert_equal",
    "assert_laws",
    "plain_conversations",
    "token_names",
    "vocabulary",
]

Messages = list[dict[str, Any]]

_WORDS = ("hello", " world", "12", "a\nb", ".", "é", "x")
_VALUES: tuple[Any, ...] = (1, 2.5, True, None, [1, 2], {"x": "é"})
PLAIN_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds é <b>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "first\nline", "minimum": 1},
                    "s": {"type": "string", "enum": ["a", "b"]},
                    "l": {"type": "array", "items": {"type": "integer", "description": "d"}},
                    "o": {
                        "type": "object",
                        "properties": {"q": {"type": ["string", "null"]}},
                        "required": ["q"],
                        "additionalProperties": False,
                    },
                },
                "required": ["s"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "n", "description": "N", "parameters": {"type": "object", "properties": {}}},
    },
)


def token_names(family: ModelFamily[Any]) -> list[str]:
    """The tokens that the module of `family` defines."""
    module = sys.modules[type(family).__module__]
    found = [value for value in vars(module).values() if isinstance(value, Token)]
    return list(dict.fromkeys([token.name for token in found] + list(family.stop_tokens())))


def vocabulary(family: ModelFamily[Any], directory: Path, *, lacking: Sequence[str] = ()) -> FileTokenizer:
    """A small byte-level tokenizer that has the tokens of `family` but those that are `lacking`."""
    special = [name for name in (*CHATML, *token_names(family)) if name not in lacking]
    return load_tokenizer(write_tokenizer(directory, special=special))


def assert_laws(
    family: ModelFamily[Any],
    tokenizer: FileTokenizer,
    *,
    count: int,
    seed: int = 0,
    official: OfficialTemplate | None = None,
    compare: int = 0,
) -> Verdict:
    """Fails where `family` breaks a law on `count` generated conversations, refuses one, or says another text than its
    official template on one of `compare` more."""
    verdict = verify(
        family,
        tokenizer,
        count=count,
        seed=seed,
        special=sorted(tokenizer.special_names),
        official=official,
        compare=compare,
    )
    assert not verdict.broken, verdict.findings
    assert verdict.refused == 0, verdict.findings
    assert verdict.calls > 0, "no conversation had a tool call"
    assert official is None or verdict.compared > 0, "the official template was append-only on no conversation"
    return verdict


class FamilyLaws(FamilySuite):
    """`FamilySuite`, and the laws on thousands of generated conversations, shared among the `ways` to configure the
    family; many more in a nightly run, which notes what it found (`miles_core.testing.family_table`)."""

    ways: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    conversations: ClassVar[int] = 5_000
    nightly_conversations: ClassVar[int] = 100_000

    def family(self, way: Mapping[str, Any]) -> ModelFamily[Any]:
        """The family that is tried."""
        made = self.component(self.component.Config(**way))
        assert isinstance(made, ModelFamily)
        return made

    def tokenizer(self, way: Mapping[str, Any], directory: Path) -> FileTokenizer:
        """Its vocabulary: `vocabulary`, which finds the tokens that the family's module defines."""
        return vocabulary(FamilyLaws.family(self, way), directory)

    def official(self, way: Mapping[str, Any]) -> OfficialTemplate | None:
        """The template that it is held to, if there is one."""
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "way" in metafunc.fixturenames:
            metafunc.parametrize("way", self.ways, ids=_title)

    def test_no_law_is_broken(self, way: Mapping[str, Any], tmp_path: Path) -> None:
        self._try(way, tmp_path, self.conversations, seed=0)

    @pytest.mark.nightly
    def test_no_law_is_broken_in_a_night(self, way: Mapping[str, Any], tmp_path: Path) -> None:
        begin = time.process_time()
        verdict = self._try(way, tmp_path, self.nightly_conversations, seed=1)
        name = type(self).component.__module__.partition(".")[0].rpartition("_")[2]
        record(Row.of(name, _title(way), verdict, time.process_time() - begin))

    def _try(self, way: Mapping[str, Any], directory: Path, together: int, *, seed: int) -> Verdict:
        count = together // len(self.ways)
        return assert_laws(
            self.family(way),
            self.tokenizer(way, directory),
            count=count,
            seed=seed,
            official=self.official(way),
            compare=count // 8,
        )


def _title(way: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in way.items()) or "default"


def plain_conversations(
    count: int, *, reasoning: bool, tools: bool = True, turns: int = 3, seed: int = 0
) -> Iterator[tuple[Messages, Sequence[Mapping[str, Any]]]]:
    """Conversations of plain words that end with a question or a result, and the tools that they offer. `reasoning`: on
    every reply, or on none. `turns`: the most questions. Calls have ids as Kimi counts them."""
    pick = random.Random(seed)

    def text() -> str:
        return "".join(pick.choice(_WORDS) for _ in range(pick.randrange(1, 4))).strip()

    for _ in range(count):
        messages: Messages = [{"role": "system", "content": text()}] if pick.random() < 0.5 else []
        offered = tools and pick.random() < 0.5
        made = 0
        for _turn in range(pick.randrange(1, turns + 1)):
            messages.append({"role": "user", "content": text()})
            for _step in range(3):
                reply: dict[str, Any] = {"role": "assistant", "content": text()}
                if reasoning:
                    reply["reasoning_content"] = text()
                calls = [_call(pick, made + n, text()) for n in range(pick.randrange(3) if offered and made < 8 else 0)]
                made += len(calls)
                messages.append({**reply, "tool_calls": calls} if calls else reply)
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": text()} for call in calls]
                if not calls:
                    break
        if messages[-1]["role"] == "assistant":
            if turns == 1:
                messages.pop()
            else:
                messages.append({"role": "user", "content": text()})
        yield messages, PLAIN_TOOLS if offered else ()


def assert_equal(
    family: ModelFamily[Any],
    theirs: Callable[[Messages, Sequence[Mapping[str, Any]]], str],
    conversations: Iterator[tuple[Messages, Sequence[Mapping[str, Any]]]],
) -> None:
    """Fails where the text of `family`, up to the next generation prompt, is not that of another implementation."""
    compared = 0
    for messages, tools in conversations:
        ours = "".join(s.text for s in family.segments(messages, tools=tools, add_generation_prompt=True))
        expected = theirs(messages, tools)
        at = next((i for i, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(ours), len(expected)) if at is None else at
        assert ours == expected, f"at {at}: {ours[at : at + 60]!r}, they say {expected[at : at + 60]!r}\n{messages}"
        compared += 1
    assert compared > 0


def _call(pick: random.Random, number: int, text: str) -> dict[str, Any]:
    arguments = json.dumps({"a": pick.choice(_VALUES), "s": text}, ensure_ascii=False)
    return {"id": f"functions.add:{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}
