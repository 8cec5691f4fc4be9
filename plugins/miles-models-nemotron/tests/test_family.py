"""`nemotron3` against the official templates (read from the trl wheel), and every law of a family."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from miles_models_nemotron import Nemotron3Config, Nemotron3Family
from pydantic import ValidationError

from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.families import FamilyLaws
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.official import OfficialTemplate

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
TEMPLATES = {
    "nano": "nemotron_3_nano",
    "super": "nemotron_3_super",
    "ultra": "nemotron_3_ultra",
    "lightning": "nemotron_3_5_lightning",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return tags_are_tokens(tmp_path_factory.mktemp("tokenizer"))


def tags_are_tokens(directory: Path) -> FileTokenizer:
    return load_tokenizer(write_tokenizer(directory, added=TAGS))


def official(model: str, **arguments: Any) -> OfficialTemplate:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the trl wheel, which carries the official templates, is not installed")
    path = Path(spec.origin).parent / "chat_templates" / f"{TEMPLATES[model]}.jinja"
    return OfficialTemplate(path.read_text(encoding="utf-8"), path.stem, arguments)


class TestNemotron3Family(FamilyLaws):
    component = Nemotron3Family
    ways = tuple({"model": model, "thinking": thinking} for model in TEMPLATES for thinking in ("forced", "off"))

    def tokenizer(self, way: Mapping[str, Any], directory: Path) -> FileTokenizer:
        return tags_are_tokens(directory)

    def official(self, way: Mapping[str, Any]) -> OfficialTemplate:
        thinks = way["thinking"] == "forced"
        return official(way["model"], enable_thinking=thinks, truncate_history_thinking=False)


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
