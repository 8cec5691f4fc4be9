"""From segments to ids: what is joined, what is a boundary, what is one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.families import Segment
from miles_core.data.segments import encode_segments, suffix_segments
from miles_core.errors import ModelError


class PairTokenizer:
    """Two letters a token where it can: tokenisation depends on what is tokenised together."""

    tokens: Mapping[str, int] = MappingProxyType({"<s>": 1, "<call>": 2})
    vocab_size = 1 << 20
    eos_id = None

    def encode(self, text: str) -> list[int]:
        return [sum(ord(c) << 8 * i for i, c in enumerate(text[p : p + 2])) for p in range(0, len(text), 2)]

    def special(self, token: str) -> int:
        if token not in self.tokens:
            raise ModelError(f"no {token}")
        return self.tokens[token]

    def added(self, token: str) -> int | None:
        return self.tokens.get(token)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        raise AssertionError("segments are never decoded")


TOKENIZER = PairTokenizer()


def test_adjacent_text_is_tokenised_together():
    assert encode_segments([Segment("a"), Segment(""), Segment("bc")], TOKENIZER)[0] == TOKENIZER.encode("abc")


def test_a_change_of_sampled_is_a_boundary():
    ids, sampled = encode_segments([Segment("a"), Segment("bc", sampled=True), Segment("d")], TOKENIZER)
    assert ids == [*TOKENIZER.encode("a"), *TOKENIZER.encode("bc"), *TOKENIZER.encode("d")]
    assert sampled == [False, True, False]


def test_special_is_one_id_and_text_that_spells_it_is_not():
    ids, sampled = encode_segments([Segment("<s>", special=True, sampled=True), Segment("<s>")], TOKENIZER)
    assert ids == [1, *TOKENIZER.encode("<s>")]
    assert sampled == [True, False, False]


def test_optional_special_is_text_where_the_vocabulary_lacks_it():
    known = Segment("<call>", special=True, optional=True)
    unknown = Segment("<what>", special=True, optional=True)
    assert encode_segments([Segment("a"), known], TOKENIZER)[0] == [*TOKENIZER.encode("a"), 2]
    assert encode_segments([Segment("a"), unknown], TOKENIZER)[0] == TOKENIZER.encode("a<what>")
    with pytest.raises(ModelError):
        encode_segments([Segment("<what>", special=True)], TOKENIZER)


@given(st.lists(st.tuples(st.text("abc", max_size=3), st.booleans(), st.booleans())))
def test_equals_an_obvious_reference(parts: list[tuple[str, bool, bool]]):
    segments = [
        Segment("<s>" if special else text, special=special, sampled=sampled) for text, special, sampled in parts
    ]
    expected: list[tuple[int, bool]] = []
    position = 0
    while position < len(segments):
        segment = segments[position]
        if segment.special:
            expected.append((1, segment.sampled))
            position += 1
            continue
        run = ""
        sampled = next((s.sampled for s in segments[position:] if s.special or s.text), False)
        while position < len(segments) and not segments[position].special:
            if segments[position].text and segments[position].sampled != sampled:
                break
            run += segments[position].text
            position += 1
        expected += [(i, sampled) for i in TOKENIZER.encode(run)]
    ids, flags = encode_segments(segments, TOKENIZER)
    assert list(zip(ids, flags, strict=True)) == expected


def test_suffix_is_what_stands_behind_a_message():
    segments = [Segment("a", message=-1), Segment("b", message=0), Segment("c", message=1), Segment("d", message=2)]
    assert [s.text for s in suffix_segments(segments, after=0)] == ["c", "d"]
