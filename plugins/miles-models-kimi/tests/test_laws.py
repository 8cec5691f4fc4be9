"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

from miles_models_kimi.family import KimiFamily

from miles_core.testing.families import FamilyLaws


class TestKimiFamily(FamilyLaws):
    component = KimiFamily
    ways = ({"version": "k2"}, {"version": "k2.5"}, {"version": "k2.6", "thinking": False})
