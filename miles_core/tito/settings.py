"""What a server's sessions have in common, and what one of them may do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from miles_core.contracts.engines import EngineClient, Sampling
from miles_core.contracts.families import ModelFamily, Tokenizer
from miles_core.contracts.matchers import MessageMatcher
from miles_core.tito.tree import Mode

__all__ = ["Codec", "SessionSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """How a server's sessions write, read and recognise messages."""

    family: ModelFamily[Any]
    tokenizer: Tokenizer
    matcher: MessageMatcher[Any]

    def stop_ids(self) -> set[int]:
        return {self.tokenizer.special(token) for token in self.family.stop_tokens()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """What one session may do.

    `sampling` holds the defaults and the most new tokens of a turn. When `locked`, a client's temperature, top_p,
    top_k, min_p and seed are ignored: log-probs that train must be those of the run's own sampling. `turn_seed(turn)`
    seeds a turn; without it a client's seed counts, or none. `max_tokens` bounds one trajectory (0: no bound),
    `max_nodes` and `max_session_tokens` the whole session. `ttl` is in seconds without a request.
    """

    engine: EngineClient
    sampling: Sampling
    locked: bool = False
    turn_seed: Callable[[int], int] | None = None
    max_tokens: int = 0
    mode: Mode = "branching"
    max_nodes: int = 4096
    max_session_tokens: int = 1 << 24
    routing_key: str = ""
    priority: int = 0
    ttl: float = 3600.0
