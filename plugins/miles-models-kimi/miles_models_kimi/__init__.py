"""The `kimi` family for miles-core: Kimi K2, K2.5 and K2.6."""

from __future__ import annotations

from miles_core import hookimpl
from miles_models_kimi.family import KimiFamily

__all__ = ["KimiFamily", "miles_model_families"]


@hookimpl
def miles_model_families() -> dict[str, type[KimiFamily]]:
    """`kimi`."""
    return {"kimi": KimiFamily}
