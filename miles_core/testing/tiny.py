"""The tiny model of the kit, built once."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tiny_model"]


def tiny_model() -> Path:
    """Directory of the model `tiny:0` (random weights, 100 thousand parameters), built when the cache lacks it. Needs
    torch and transformers for that."""
    from miles_core.models.reference import resolve_model

    return resolve_model("tiny:0").directory
