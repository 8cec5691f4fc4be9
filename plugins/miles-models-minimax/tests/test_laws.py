"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

import pytest
from miles_models_minimax.family import MiniMaxConfig, MiniMaxFamily

from miles_core.testing.families import assert_laws, vocabulary
from miles_core.testing.suites import FamilySuite

WAYS = [{"version": "m2"}, {"version": "m2.5"}, {"version": "m2.7", "default_system": "S"}]
CI, NIGHTLY = 5_000, 100_000


class TestMiniMaxFamily(FamilySuite):
    component = MiniMaxFamily


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_law_is_broken(way, tmp_path):
    family = MiniMaxFamily(MiniMaxConfig(**way))
    assert_laws(family, vocabulary(family, tmp_path), count=CI // len(WAYS))


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_law_is_broken_in_a_night(way, tmp_path):
    family = MiniMaxFamily(MiniMaxConfig(**way))
    assert_laws(family, vocabulary(family, tmp_path), count=NIGHTLY // len(WAYS), seed=1)
