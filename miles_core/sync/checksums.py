"""Checksums of tensor bytes: xxh3-128, hexadecimal. Bytes, not values: −0.0 and 0.0 differ, NaN payloads too."""

from __future__ import annotations

import xxhash

__all__ = ["checksum", "differences"]


def checksum(data: bytes | memoryview) -> str:
    """xxh3-128 of the bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


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
