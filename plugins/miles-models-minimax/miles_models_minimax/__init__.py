"""The `minimax` family for miles-core: MiniMax M2, M2.5 and M2.7."""

from __future__ import annotations

from miles_core import hookimpl
from miles_models_minimax.family import MiniMaxFamily

__all__ = ["MiniMaxFamily", "miles_model_families"]


@hookimpl
def miles_model_families() -> dict[str, type[MiniMaxFamily]]:
    """`minimax`."""
    return {"minimax": MiniMaxFamily}
