"""The `inkling` family for miles-core: Inkling and Inkling-Small."""

from __future__ import annotations

from miles_core import hookimpl
from miles_models_inkling.family import InklingFamily

__all__ = ["InklingFamily", "miles_model_families"]


@hookimpl
def miles_model_families() -> dict[str, type[InklingFamily]]:
    """`inkling`."""
    return {"inkling": InklingFamily}
