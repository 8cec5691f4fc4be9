"""The `glm` family for miles-core: GLM 4.5 to 5.2."""

from __future__ import annotations

from miles_core import hookimpl
from miles_models_glm.family import GlmFamily

__all__ = ["GlmFamily", "miles_model_families"]


@hookimpl
def miles_model_families() -> dict[str, type[GlmFamily]]:
    """`glm`."""
    return {"glm": GlmFamily}
