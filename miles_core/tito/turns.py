"""What a dialect and a session say to each other: one turn's request, and its reply."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.errors import MilesError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from miles_core.contracts.engines import Generation

__all__ = ["BadRequestError", "Reply", "TurnRequest"]


class BadRequestError(MilesError):
    """A client's request cannot be answered (HTTP 400). `code` is the machine's word for it."""

    def __init__(self, message: str, *, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """One turn as every dialect reads it: Chat Completions messages and tools. None is what the client left out.

    `model` is what the client called the model, and is given back to it. `previous` is the `turn_id` of the turn that
    the messages continue, for clients that send only what is new. `ids` is the whole prompt as token ids, from clients
    that render it themselves; there are no messages then.
    """

    messages: Sequence[Mapping[str, Any]]
    ids: NDArray[np.int32] | None = None
    model: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    stream: bool = False
    include_usage: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    previous: str | None = None
    turn_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    """Seconds since the epoch, when the request was read."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the dialect needs again for the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A finished, recorded turn. `message` is the assistant's message as the client gets it, every tool call with an
    id; `finish_reason` is `stop`, `length` or `tool_calls`; `stop_sequence` the string that ended it, if one did. Where
    the prompt was token ids, `generations` holds what was sampled and `message` is empty."""

    message: Mapping[str, Any]
    finish_reason: str
    stop_sequence: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    generations: tuple[Generation, ...] = ()
