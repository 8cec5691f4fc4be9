"""An engine client that answers from a script and keeps what it was asked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from miles_core.contracts.engines import Generation, OnTokens, Sampling, TokenIds
from miles_core.errors import EngineUnavailable

__all__ = ["Asked", "ScriptedClient"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request, and what it was answered."""

    input_ids: tuple[int, ...]
    sampling: Sampling
    routing_key: str
    generation: Generation


class ScriptedClient:
    """Implements `miles_core.contracts.engines.EngineClient`.

    Every request is answered with `ids` (as many as its limit allows) and `finish_reason`; log-probs and versions tell
    requests and positions apart. With `hang` it never answers, with `down` it raises `EngineUnavailable`.
    """

    def __init__(
        self, ids: Sequence[int], finish_reason: str = "stop", *, hang: bool = False, down: bool = False
    ) -> None:
        self._ids = list(ids)
        self._reason = finish_reason
        self._hang = hang
        self._down = down
        self.asked: list[Asked] = []
        self.waiting = 0
        """Requests that have not been answered or cancelled."""

    async def generate(
        self,
        input_ids: TokenIds,
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        self.waiting += 1
        try:
            await asyncio.sleep(0)
            if self._down:
                raise EngineUnavailable("the engine is gone, says the script")
            if self._hang:
                await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        number = len(self.asked) + 1
        ids = np.array(self._ids[: sampling.max_new_tokens], np.int32)
        if on_tokens is not None:
            for count in range(1, len(ids) + 1):
                on_tokens(ids[:count].tolist())
        generation = Generation(
            token_ids=ids,
            logprobs=(-0.5 * number - 0.01 * np.arange(len(ids))).astype(np.float32),
            versions=np.full(len(ids), 10 + number, np.int32),
            finish_reason=self._reason if len(ids) == len(self._ids) else "length",
            engine="http://scripted",
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            started=float(number),
            finished=number + 0.5,
            request_id=f"request-{number}",
        )
        self.asked.append(
            Asked(input_ids=tuple(input_ids), sampling=sampling, routing_key=routing_key, generation=generation)
        )
        return generation
