"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

import pytest
from miles_models_glm.family import GlmConfig, GlmFamily

from miles_core.testing.families import assert_laws, vocabulary
from miles_core.testing.suites import FamilySuite

WAYS = [
    {"version": "4.5"},
    {"version": "4.5", "thinking": False},
    {"version": "4.7"},
    {"version": "5.1", "thinking": False},
    {"version": "5.2", "reasoning_effort": "high"},
]
CI, NIGHTLY = 5_000, 100_000


class TestGlmFamily(FamilySuite):
    component = GlmFamily


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_law_is_broken(way, tmp_path):
    family = GlmFamily(GlmConfig(**way))
    assert_laws(family, vocabulary(family, tmp_path), count=CI // len(WAYS))


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_law_is_broken_in_a_night(way, tmp_path):
    family = GlmFamily(GlmConfig(**way))
    assert_laws(family, vocabulary(family, tmp_path), count=NIGHTLY // len(WAYS), seed=1)
