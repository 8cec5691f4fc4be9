"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

from miles_models_minimax.family import MiniMaxFamily

from miles_core.testing.families import FamilyLaws


class TestMiniMaxFamily(FamilyLaws):
    component = MiniMaxFamily
    ways = ({"version": "m2"}, {"version": "m2.5"}, {"version": "m2.7", "default_system": "S"})
