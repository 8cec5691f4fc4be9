"""Model references, conversion and size estimates. Torch is imported only where weights are touched."""

from __future__ import annotations

from miles_core.models.memory import MemoryEstimate, memory_estimate
from miles_core.models.reference import ResolvedModel, resolve_model

__all__ = ["MemoryEstimate", "ResolvedModel", "memory_estimate", "resolve_model"]
