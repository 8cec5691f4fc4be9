"""Inference engines: token ids in, sampled token ids with log-probs and versions out.

The wire protocol is SGLang's native `/generate`; `Engine` components know how to reach or start servers that
speak it, `EngineClient` is what environments call.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from miles_core.contracts.component import Component, ConfigT

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from miles_core.contracts.launchers import Launcher

__all__ = [
    "Engine",
    "EngineClient",
    "EngineFleet",
    "EngineStart",
    "Generation",
    "OnTokens",
    "PauseMode",
    "Sampling",
    "TokenIds",
    "WeightWitness",
]

TokenIds: TypeAlias = "Sequence[int] | NDArray[np.int32]"
"""A prompt. An array goes into a request without a Python object a token."""

OnTokens = Callable[[Sequence[int]], None]

PauseMode = Literal["retract", "in_place", "abort"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. `seed` makes the generation a function of weights and request."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}, must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, must be in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One finished generation, as the engine sampled it.

    `token_ids` int32 [n], `logprobs` float32 [n] at the sampling temperature, `versions` int32 [n] the policy
    version that sampled each token. `request_id` names the request at the engine. `finish_reason` is `stop`, `length`
    or `abort` (partial tokens are kept). `routed_experts` is int32 [rows, layers, k] for the positions from
    `routed_start` on, when asked for.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str
    engine: str
    prompt_tokens: int
    cached_tokens: int
    started: float
    finished: float
    text: str = ""
    routed_experts: NDArray[np.int32] | None = None
    routed_start: int = 0
    request_id: str = ""


class EngineClient(Protocol):
    """What an environment sees of inference."""

    async def generate(
        self,
        input_ids: TokenIds,
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample a continuation of `input_ids`. Requests with one `routing_key` go to the engine that holds its
        prefix. `on_tokens` is called, as the engine gives them, with all ids sampled so far; what it raises ends the
        request. Raises `EngineRefusal` for a bad request, `EngineUnavailable` past the deadline."""
        ...


class EngineFleet(Protocol):
    """What publishing sees of the engines of a run. An engine is routed to once it is admitted, until it is drained."""

    @property
    def urls(self) -> list[str]:
        """All engines of the run, those that nothing is routed to among them."""
        ...

    @property
    def publishing(self) -> AbstractAsyncContextManager[None]:
        """Held through a publish: two of them never meet."""
        ...

    def paused(
        self, mode: PauseMode, urls: Sequence[str] | None = None
    ) -> AbstractAsyncContextManager[Mapping[str, Exception]]:
        """These engines (default: all) are paused inside the block, and go on after it whatever happened. Yields those
        that could not be paused, with the reason."""
        ...

    async def probe(self, url: str) -> None:
        """Return when the engine answers; `EngineUnavailable` when it does not in some seconds."""
        ...

    def admit(self, url: str, version: int) -> None:
        """The engine was found to hold `version`: route to it."""
        ...

    async def drain(self, url: str, reason: str) -> None:
        """Nothing may be sampled from this engine any more, nor anything be taken that it still answers: requests in
        flight go to other engines."""
        ...

    async def flush(self, url: str) -> None:
        """Forget the keys and values that earlier weights made."""
        ...

    async def checksums(self, url: str) -> Mapping[str, str]:
        """Checksum of every tensor that the engine serves now, under its own names: see `Engine.witness`."""
        ...


class WeightWitness(Protocol):
    """Computes what an engine's `/weights_checker` must answer, from the trainer's tensors on their way out."""

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, under its checkpoint name, in the dtype of the engine."""
        ...

    def expected(self) -> dict[str, str]:
        """Checksums by the engine's names, once everything was seen. Raises `PublishError` when a fused tensor is not
        complete."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineStart:
    """What a run tells an engine component that has to launch servers."""

    model_directory: Path
    dtype: str
    run_directory: Path
    wait_for_weights: bool
    policy_version: int
    environment: dict[str, str]


class Engine(Component[ConfigT], abc.ABC):
    """Reaches, or launches, the inference servers of a run."""

    scores_at_temperature: ClassVar[bool] = False
    """Whether its servers give log-probs of given tokens at `logprob_temperature`, and not at temperature 1 alone."""

    @abc.abstractmethod
    async def start(self, launcher: Launcher[Any], start: EngineStart) -> list[str]:
        """Base URLs of servers that answer `/health`. Servers are either the user's (a URL list) or launched
        through `launcher`, which owns their lifetime."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Stop what `start` launched, never what the user runs."""

    def witness(self) -> WeightWitness | None:
        """A new witness of the checksums that its servers report. Default None: they report xxh3-128 of every tensor's
        bytes, under checkpoint names. Called in the trainer."""
        return None

    def restarts(self) -> AsyncIterator[str]:
        """URLs of servers replaced while the run goes on; they serve nothing until they hold the current version."""

        async def none() -> AsyncIterator[str]:
            return
            yield ""

        return none()
