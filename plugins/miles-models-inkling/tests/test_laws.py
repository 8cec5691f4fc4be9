"""Append-only, parse and render, junctions, streams: on thousands of generated conversations."""

from __future__ import annotations

from miles_models_inkling.family import InklingFamily

from miles_core.testing.families import FamilyLaws


class TestInklingFamily(FamilyLaws):
    component = InklingFamily
    ways = ({}, {"reasoning_effort": 0.0})
