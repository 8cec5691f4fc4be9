"""Checksums of a plan against those that an engine reports."""

from __future__ import annotations

__all__ = ["differences"]


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """What differs between two name → checksum maps, a sentence each; empty when they are equal."""
    sentences = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    sentences += [f"{name} is not in the plan" for name in sorted(found.keys() - expected.keys())]
    sentences += [
        f"{name} has checksum {found[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    return sentences
