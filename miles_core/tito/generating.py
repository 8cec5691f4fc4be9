"""Sampling one reply, however often the engine has to be asked for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.engines import Generation, Sampling
from miles_core.data.seeds import derive_seed
from miles_core.errors import EngineError, EngineUnavailable
from miles_core.tito.settings import SessionSettings
from miles_core.tito.streaming import Progress

__all__ = ["generate"]

_RESUMES = 16
"""How often a turn whose generation the engine aborts is taken up again where it stopped."""


async def generate(
    settings: SessionSettings, key: str, ids: NDArray[np.int32], sampling: Sampling, progress: Progress | None
) -> list[Generation]:
    """The generations that make the reply: one, and one more each time the engine aborts it (new weights)."""
    done: list[Generation] = []
    prompt, seed = ids, sampling.seed
    while True:
        options: dict[str, Any] = {}
        if progress is not None:
            options["on_tokens"] = _behind([i for g in done for i in g.token_ids.tolist()], progress)
        generation = await settings.engine.generate(
            prompt,
            sampling,
            routing_key=key,
            priority=settings.priority,
            **options,
        )
        if len(generation.token_ids) and generation.prompt_tokens != len(prompt):
            raise EngineError(
                f"{generation.engine} counted {generation.prompt_tokens} prompt tokens, {len(prompt)} were sent"
            )
        done.append(generation)
        left = sampling.max_new_tokens - len(generation.token_ids)
        if generation.finish_reason != "abort":
            return done
        if left < 1:
            return [*done[:-1], dataclasses.replace(generation, finish_reason="length")]
        if len(done) > _RESUMES:
            raise EngineUnavailable(f"{generation.engine} aborted one reply {len(done)} times; nothing is recorded")
        prompt = np.concatenate([prompt, generation.token_ids])
        sampling = dataclasses.replace(
            sampling,
            max_new_tokens=left,
            seed=None if seed is None else derive_seed(seed, "resumed", len(done)),
        )


def _behind(sampled: Sequence[int], progress: Progress) -> Callable[[Sequence[int]], None]:
    return lambda ids: progress.tokens([*sampled, *ids])
