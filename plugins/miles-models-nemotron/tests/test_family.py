"""`nemotron3` against the official templates (read from the trl wheel), and every law of a family."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from miles_models_nemotron import Nemotron3Config, Nemotron3Family
from pydantic import ValidationError

from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.suites import FamilySuite
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.official import OfficialTemplate
from miles_core.tito.verify import verify

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
TEMPLATES = {
    "nano": "nemotron_3_nano",
    "super": "nemotron_3_super",
    "ultra": "nemotron_3_ultra",
    "lightning": "nemotron_3_5_lightning",
}
WAYS = [(model, thinking) for model in TEMPLATES for thinking in ("forced", "off")]


class TestNemotron3Family(FamilySuite):
    component = Nemotron3Family


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), added=TAGS))


def official(model: str, **arguments: Any) -> OfficialTemplate:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the trl wheel, which carries the official templates, is not installed")
    path = Path(spec.origin).parent / "chat_templates" / f"{TEMPLATES[model]}.jinja"
    return OfficialTemplate(path.read_text(encoding="utf-8"), path.stem, arguments)


@pytest.mark.parametrize(("model", "thinking"), WAYS)
def test_no_law_is_broken_and_the_text_is_the_official_one(model: Any, thinking: Any, tokenizer: FileTokenizer):
    """Eight ways, 5,000 conversations together, and 600 more that the template can be compared on."""
    verdict = verify(
        Nemotron3Family(Nemotron3Config(model=model, thinking=thinking)),
        tokenizer,
        count=625,
        special=sorted(tokenizer.special_names),
        official=official(model, enable_thinking=thinking == "forced", truncate_history_thinking=False),
        compare=75,
    )
    assert not verdict.broken, verdict.findings
    assert verdict.refused == 0
    assert verdict.calls > verdict.conversations
    assert verdict.malformed > verdict.conversations / 2
    assert verdict.compared >= 15


@pytest.mark.parametrize(
    ("model", "effort", "argument"), [("super", "low", "low_effort"), ("ultra", "medium", "medium_effort")]
)
def test_effort_is_said_as_the_template_says_it(model: Any, effort: Any, argument: str):
    family = Nemotron3Family(Nemotron3Config(model=model, effort=effort))
    question = [{"role": "user", "content": "q"}]
    ours = "".join(s.text for s in family.segments(question, add_generation_prompt=True))
    assert ours == official(model, **{argument: True}).text(question, generate=True)


def test_effort_stays_in_earlier_messages(tokenizer: FileTokenizer):
    family = Nemotron3Family(Nemotron3Config(model="super", effort="low"))
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    whole = family.render(talk, tokenizer)
    assert whole[: len(family.render(talk[:1], tokenizer))] == family.render(talk[:1], tokenizer)
    assert tokenizer.decode(whole).count("{reasoning effort: low}") == 2


@pytest.mark.parametrize(("model", "effort"), [("nano", "low"), ("super", "medium"), ("lightning", "medium")])
def test_an_effort_that_the_model_has_not_is_refused(model: Any, effort: Any):
    with pytest.raises(ValidationError, match="its template has no such effort"):
        Nemotron3Config(model=model, effort=effort)
