"""The `deepseek` family for miles-core: DeepSeek V3.1, V3.2 and V4."""

from __future__ import annotations

from miles_core import hookimpl
from miles_models_deepseek.family import DeepSeekFamily

__all__ = ["DeepSeekFamily", "miles_model_families"]


@hookimpl
def miles_model_families() -> dict[str, type[DeepSeekFamily]]:
    """`deepseek`."""
    return {"deepseek": DeepSeekFamily}
