"""The laws of every family of the core on thousands of generated conversations, and the nightly run of many more."""

from __future__ import annotations

import time

import pytest

from miles_core.data.tokenizer import FileTokenizer
from miles_core.testing.families import assert_laws
from miles_core.testing.family_table import Row, record
from miles_core.tito.families.chatml import ChatMLConfig, ChatMLFamily
from miles_core.tito.verify import conversations, verify
from tests.tito.family_cases import CASES, Case, tags_are_tokens

CI, COMPARED, NIGHTLY = 5_000, 600, 100_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return tags_are_tokens(tmp_path_factory.mktemp("tokenizer"))


def ways(family: str) -> list[Case]:
    return [case for case in CASES if case.family == family]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {case.way}".strip())
def test_no_law_is_broken(case: Case, tokenizer: FileTokenizer):
    official = case.official()
    verdict = assert_laws(
        case.made,
        tokenizer,
        count=round(CI * case.share),
        official=official,
        compare=round(COMPARED * case.share),
    )
    assert verdict.calls > verdict.conversations  # the laws met what they are about
    assert verdict.malformed > verdict.conversations / 2
    if official is not None:
        assert verdict.compared >= 10


class Forgets(ChatMLFamily[ChatMLConfig]):
    """Cuts what the assistant said at its first newline, but in the last message."""

    def segments(self, messages, *, tools=(), add_generation_prompt=False):
        last = len(messages) - 1
        shown = [
            {**m, "content": (m.get("content") or "").split("\n")[0]} if m["role"] == "assistant" and i < last else m
            for i, m in enumerate(messages)
        ]
        return super().segments(shown, tools=tools, add_generation_prompt=add_generation_prompt)


class Shouts(ChatMLFamily[ChatMLConfig]):
    """Streams what it does not know."""

    def parse_partial(self, text):
        reply = super().parse_partial(text)
        return type(reply)(content=reply.content + "!")


@pytest.mark.parametrize(("family", "law"), [(Forgets, "junction"), (Shouts, "streaming")])
def test_a_family_that_breaks_a_law_is_found(
    family: type[ChatMLFamily[ChatMLConfig]], law: str, tokenizer: FileTokenizer
):
    verdict = verify(family(ChatMLConfig()), tokenizer, count=40)
    assert verdict.broken[law] > 0
    assert law in {finding.law for finding in verdict.findings}


def test_a_family_unlike_its_template_is_found(tokenizer: FileTokenizer):
    case = next(case for case in CASES if case.template == "qwen3_instruct_2507")
    other = ChatMLFamily(ChatMLConfig(default_system="You are somebody else."))
    assert verify(other, tokenizer, count=0, official=case.official(), compare=40).broken["official template"] > 0


def test_conversations_are_a_pure_function_of_their_arguments():
    def made(seed: int) -> list[object]:
        return list(conversations(20, seed=seed, special=["<|im_end|>"], reasoning=True))

    assert made(1) == made(1)
    assert made(1) != made(2)


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_no_law_is_broken_in_a_night(family: str, tokenizer: FileTokenizer):
    """What was found is written down way by way, so that a night cut short leaves what it did."""
    for case in ways(family):
        begin = time.process_time()
        verdict = assert_laws(
            case.made,
            tokenizer,
            count=round(NIGHTLY * case.share),
            seed=1,
            official=case.official(),
            compare=round(NIGHTLY * case.share / 10),
        )
        record(Row.of(family, case.way, verdict, time.process_time() - begin))
