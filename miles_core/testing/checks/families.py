"""Laws of model families: append-only rendering, parsing that inverts it, text that never becomes a token.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.contracts.families import ModelFamily, Segment
from miles_core.data.segments import encode_segments, suffix_segments
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.kit import Case, Check
from miles_core.testing.tokenizers import CHATML, write_tokenizer

__all__ = ["CHECKS"]

Messages = list[dict[str, Any]]

TALK: Messages = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "hello\n\n4"},
    {"role": "user", "content": "And 中文?"},
    {"role": "assistant", "content": "use <b>"},
    {"role": "user", "content": ""},
]
REPLIES = ("4", "hello\nuser", "a <b> {c} 中", "")


def rendering_is_append_only_at_every_cut(case: Case) -> None:
    family, tokenizer = _family(case)
    whole = family.render(TALK, tokenizer)
    for cut in range(1, len(TALK)):
        if TALK[cut]["role"] != "assistant":
            part = family.render(TALK[:cut], tokenizer)
            where = f"the rendering of the first {cut} messages"
        else:
            part = family.render(TALK[:cut], tokenizer, add_generation_prompt=True)
            where = f"the prompt for the reply after {cut} messages"
        assert whole[: len(part)] == part, f"{where} is no prefix of the whole conversation's: sampled tokens change"


def junction_joins_a_reply_to_what_follows(case: Case) -> None:
    family, tokenizer = _family(case)
    for at, message in enumerate(TALK[:-1]):
        if message["role"] != "assistant":
            continue
        prompt = family.render(TALK[:at], tokenizer, add_generation_prompt=True)
        sampled = _sampled(family, tokenizer, TALK[:at], message)
        drop, add = family.junction(sampled, tokenizer)
        segments = family.segments(TALK[: at + 2], add_generation_prompt=True)
        rest = encode_segments(suffix_segments(segments, after=at), tokenizer)[0]
        joined = [*prompt, *sampled[: len(sampled) - drop], *add, *rest]
        whole = family.render(TALK[: at + 2], tokenizer, add_generation_prompt=True)
        assert joined == whole, (
            f"prompt, sampled ids, junction and what follows message {at} do not make the rendering of the whole"
        )


def parse_inverts_render(case: Case) -> None:
    family, tokenizer = _family(case)
    question = [{"role": "user", "content": "q"}]
    for content in REPLIES:
        sampled = _sampled(family, tokenizer, question, {"role": "assistant", "content": content})
        parsed = family.parse(sampled, tokenizer)
        assert parsed.content == content, f"a reply {content!r} is parsed as {parsed.content!r}"
        assert not parsed.tool_calls, f"a reply {content!r} without tool calls is parsed with {parsed.tool_calls}"


def a_stop_token_ends_every_reply(case: Case) -> None:
    family, _ = _family(case)
    stops = family.stop_tokens()
    assert stops, "stop_tokens() is empty: no sampled turn would ever end"
    said = [s for s in family.segments(TALK[:3]) if s.sampled and s.message == 2]
    assert said, "no segment of an assistant's message is marked as sampled"
    assert said[-1].special, f"an assistant's sampled text ends with the text {said[-1].text!r}, no stop token"
    assert said[-1].text in stops, (
        f"an assistant's turn ends with {said[-1].text!r}, which stop_tokens() lacks: {stops}"
    )


def only_the_assistant_is_sampled(case: Case) -> None:
    family, _ = _family(case)
    before = -2
    for segment in family.segments(TALK, add_generation_prompt=True):
        role = TALK[segment.message]["role"] if 0 <= segment.message < len(TALK) else ""
        ends = segment.message > before and segment.special and segment.text in family.stop_tokens()
        follows = segment.message > 0 and TALK[segment.message - 1]["role"] == "assistant"
        before = segment.message
        # Where the next role ends a turn, the assistant samples the token that opens the next message.
        assert not segment.sampled or role == "assistant" or (ends and follows), (
            f"the segment {segment.text!r} of message {segment.message} ({role or 'no message'}) is marked as sampled"
        )


def text_never_becomes_a_token(case: Case) -> None:
    family, tokenizer = _family(case)
    specials = set(tokenizer.added_tokens.values())

    def tokens(text: str) -> list[int]:
        said: Messages = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
        return [i for i in family.render(said, tokenizer, add_generation_prompt=True) if i in specials]

    plain = tokens("x")
    for name in tokenizer.special_names:
        assert tokens(f"a{name}b") == plain, f"a message that spells {name} is rendered with more special tokens"


def unknown_role_is_a_value_error(case: Case) -> None:
    family, tokenizer = _family(case)
    try:
        family.render([{"role": "narrator", "content": "x"}], tokenizer)
    except ValueError:
        return
    raise AssertionError("a message of the unknown role 'narrator' is rendered; expected a ValueError that says so")


CHECKS: tuple[Check, ...] = (
    rendering_is_append_only_at_every_cut,
    junction_joins_a_reply_to_what_follows,
    parse_inverts_render,
    a_stop_token_ends_every_reply,
    only_the_assistant_is_sampled,
    text_never_becomes_a_token,
    unknown_role_is_a_value_error,
)


def _family(case: Case) -> tuple[ModelFamily[Any], FileTokenizer]:
    """The family, and a tokenizer that has the special tokens which it writes."""
    family: ModelFamily[Any] = case.create()
    segments: Sequence[Segment] = family.segments(TALK, add_generation_prompt=True)
    names = [segment.text for segment in segments if segment.special and not segment.optional]
    special = (*CHATML, *names, *family.stop_tokens(), *case.example.inputs)
    return family, load_tokenizer(write_tokenizer(case.new_directory(), special=special))


def _sampled(
    family: ModelFamily[Any], tokenizer: FileTokenizer, before: Messages, message: Mapping[str, Any]
) -> list[int]:
    """The ids that a model samples to say `message`, its stop token included."""
    segments = family.segments([*before, message])
    own = [s for s in segments if s.message == len(before) and s.sampled]
    return encode_segments(own, tokenizer)[0]
