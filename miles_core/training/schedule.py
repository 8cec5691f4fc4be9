"""Learning rate as a pure function of the step, so that a resumed run needs no scheduler state but the step."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["Schedule", "learning_rate"]

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int, final_fraction: float
) -> float:
    """Rate of optimizer step `step` (0 is the first).

    Rises linearly over `warmup_steps` (the first step takes peak / warmup_steps), then stays, or falls to `peak` ·
    `final_fraction` at the last of `total_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 1.0)
    falling = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (final_fraction + (1 - final_fraction) * falling)
