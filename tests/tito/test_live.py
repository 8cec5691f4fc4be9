"""`miles families verify --engine`: the laws on ids that an engine sampled, here a stub that says scripted replies."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_core.cli.families import families
from miles_core.contracts.families import Segment
from miles_core.data.segments import encode_segments
from miles_core.data.tokenizer import FileTokenizer
from miles_core.engines.pool import EnginePool
from miles_core.testing.stub_engine import StubEngine, hashed_script, served_stub
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.families.qwen3_5 import Qwen35Config, Qwen35Family
from miles_core.tito.live import LiveVerdict, verify_live
from tests.tito.family_cases import TAGS, tags_are_tokens

FAMILY = Qwen35Family(Qwen35Config())
CALL = (
    "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
REPLIES = (
    "so\n</think>\n\nhello",
    f"so\n</think>\n\nhello\n\n{CALL}",
    f"{CALL}</think>{CALL}\n{CALL}",
    "never closed",
    "so\n</think>\n\n<tool_call>\n<function=write>\n<parameter=path>",
    "",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return tags_are_tokens(tmp_path_factory.mktemp("tokenizer"))


class Sampler:
    """Replies in turn, ended by the stop token. Tags are sampled as tokens, and every other time spelled as text."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        end = tokenizer.special("<|im_end|>")
        tagged = re.compile("|".join(TAGS))
        said: list[list[int]] = []
        for reply in REPLIES:
            segments = [Segment(text) for text in tagged.split(reply)]
            for at, tag in reversed(list(enumerate(tagged.findall(reply), start=1))):
                segments.insert(at, Segment(tag, special=True))
            said += [[*encode_segments(segments, tokenizer)[0], end], [*tokenizer.encode(reply), end]]
        self._replies = itertools.cycle(said)

    def __call__(self, input_ids: Sequence[int], params: dict[str, Any]) -> Sequence[int]:
        return next(self._replies)


async def verified(engine: StubEngine, tokenizer: FileTokenizer) -> LiveVerdict:
    with served_stub(engine) as stub:
        pool = EnginePool([stub.url])
        try:
            return await verify_live(FAMILY, tokenizer, pool, count=25, special=["<|im_end|>"], max_new_tokens=400)
        finally:
            await pool.close()


async def test_replies_of_an_engine_keep_the_laws(tokenizer: FileTokenizer):
    verdict = await verified(StubEngine(Sampler(tokenizer)), tokenizer)
    assert not verdict.broken, verdict.findings
    assert verdict.calls > 5
    assert verdict.malformed > 2
    assert 0 < verdict.respelled < verdict.replies  # text that spells a tag is rendered as the tag
    assert verdict.unfinished == 0


async def test_an_engine_that_samples_anything_keeps_the_laws(tokenizer: FileTokenizer):
    verdict = await verified(StubEngine(hashed_script(tokenizer.vocab_size, 80)), tokenizer)
    assert not {law for law in verdict.broken if law != "stop token"}, verdict.findings
    assert verdict.tokens == 80 * verdict.replies


class Miscounts(StubEngine):
    """Counts a token more than it was sent."""

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._answer(body)
        answer["meta_info"]["prompt_tokens"] += 1
        return answer


async def test_an_engine_that_counts_other_tokens_is_found(tokenizer: FileTokenizer):
    verdict = await verified(Miscounts(Sampler(tokenizer)), tokenizer)
    assert verdict.broken["prompt tokens"] == verdict.replies


def test_the_command_holds_conversations_with_an_engine(tmp_path: Path):
    directory = write_tokenizer(tmp_path, added=TAGS)
    with served_stub(StubEngine(lambda ids, params: [65, 66, 258])) as stub:
        command = ["verify", "qwen3", "--tokenizer", str(directory), "--engine", stub.url, "--count", "5"]
        done = CliRunner().invoke(families, command)
    assert "5 conversations with http://127.0.0.1" in done.output, done.output
