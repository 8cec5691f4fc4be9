"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

from miles_models_glm.family import GlmFamily

from miles_core.testing.families import FamilyLaws


class TestGlmFamily(FamilyLaws):
    component = GlmFamily
    ways = (
        {"version": "4.5"},
        {"version": "4.5", "thinking": False},
        {"version": "4.7"},
        {"version": "5.1", "thinking": False},
        {"version": "5.2", "reasoning_effort": "high"},
    )
