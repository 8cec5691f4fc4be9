"""The Nemotron 3 models for miles-core."""

from __future__ import annotations

from miles_core import hookimpl
from miles_models_nemotron.family import Nemotron3Config, Nemotron3Family

__all__ = ["Nemotron3Config", "Nemotron3Family", "miles_model_families"]


@hookimpl
def miles_model_families() -> dict[str, type[Nemotron3Family]]:
    """`nemotron3`."""
    return {"nemotron3": Nemotron3Family}
