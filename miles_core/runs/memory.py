"""The memory that a run's processes will need, in words, against what this host has."""

from __future__ import annotations

import os
from typing import Any

from miles_core.config.run import RunConfig
from miles_core.models.memory import MemoryEstimate, memory_estimate
from miles_core.models.reference import resolve_model

__all__ = ["describe_memory"]

_GIB = 1 << 30


def describe_memory(config: RunConfig) -> list[str]:
    """One line a process, and a warning when the sum is above this host's memory."""
    model = resolve_model(config.model.path)
    trainer = memory_estimate(
        model.directory,
        role="train",
        dtype=config.model.dtype,
        tokens=_number(config.backend.settings, "max_tokens_per_microbatch", 4096),
        checkpointing=bool(config.backend.settings.get("activation_checkpointing", False)),
    )
    lines = [_line("trainer", trainer)]
    total = trainer.total
    if config.engine.use == "embedded":
        engine = memory_estimate(
            model.directory,
            role="generate",
            dtype=config.model.dtype,
            tokens=_number(config.engine.settings, "max_total_tokens", 16384),
        )
        count = _number(config.engine.settings, "count", 1)
        lines.append(_line("engine" if count == 1 else f"engine (each of {count})", engine))
        total += count * engine.total
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total > available:
        lines.append(
            f"warning: {total / _GIB:.1f} GiB are needed and this host has {available / _GIB:.1f} GiB; lower "
            "backend.max_tokens_per_microbatch or engine.max_total_tokens, or turn on backend.activation_checkpointing"
        )
    return lines


def _number(settings: dict[str, Any], key: str, default: int) -> int:
    return int(settings.get(key, default))


def _line(name: str, estimate: MemoryEstimate) -> str:
    return (
        f"memory of {name}: about {estimate.total / _GIB:.2f} GiB (weights {estimate.weights / _GIB:.2f}, optimizer "
        f"{(estimate.optimizer + estimate.gradients) / _GIB:.2f}, activations "
        f"{(estimate.activations + estimate.logits) / _GIB:.2f}, key-value cache {estimate.kv_cache / _GIB:.2f})"
    )
