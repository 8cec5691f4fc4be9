"""One request on its way through the engine: its tokens, what is known of each, and its answer."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from .prefix_cache import IntArray, Node
    from .protocol import GenerateRequest

    LogprobEntry = tuple[float | None, int, None]


class Decoder(Protocol):
    """The part of a tokenizer that the engine uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ``token_ids``."""
        ...


@dataclass(eq=False)
class Sequence:
    """A request's state. Positions count from the first prompt token."""

    request: GenerateRequest
    arrival: int
    ids: list[int] = field(default_factory=list)
    """Prompt, then sampled tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Of each sampled token, at the sampling temperature, before truncation (at 1 when greedy)."""
    logprobs_original: list[float] = field(default_factory=list)
    """The same at temperature 1."""
    versions: list[str] = field(default_factory=list)
    """Weight version that sampled each token."""
    top_logprobs: list[list[LogprobEntry]] = field(default_factory=list)
    chosen_logprobs: list[list[LogprobEntry]] = field(default_factory=list)
    """Of ``request.token_ids_logprob``, a list for each sampled token."""
    input_logprobs: list[LogprobEntry] = field(default_factory=list)
    """Of prompt tokens from ``request.logprob_start_len`` on, at the request's ``logprob_temperature``."""
    input_top_logprobs: list[list[LogprobEntry]] = field(default_factory=list)
    input_chosen_logprobs: list[list[LogprobEntry]] = field(default_factory=list)
    cached_tokens: int | None = None
    """Prompt tokens whose keys and values were there at the first admission."""
    retractions: int = 0
    finish_reason: dict[str, Any] | None = None
    routes: npt.NDArray[np.int32] | None = None
    """[tokens, layers, k], filled when the request asked for routed experts."""

    # What the scheduler keeps while the sequence runs.
    slots: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Pool slot of each position; the first ``owned`` belong to the prefix cache."""
    allocated: int = 0
    """Leading entries of ``slots`` that are set."""
    owned: int = 0
    node: Node | None = None
    epoch: int = 0
    computed: int = 0
    """Leading tokens whose keys and values are in the pool."""
    row: int | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.request.input_ids)
        if self.request.logprob_start_len == 0:  # nothing predicts the first token
            self.input_logprobs.append((None, self.ids[0], None))
            self.input_top_logprobs.append([])
            self.input_chosen_logprobs.append([])

    @property
    def order(self) -> tuple[int, int]:
        """Queue position: lower first."""
        return self.request.priority, self.arrival

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.input_ids)

    @property
    def output_ids(self) -> list[int]:
        """Sampled tokens so far."""
        return self.ids[self.prompt_tokens :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.sampling.max_new_tokens - (len(self.ids) - self.prompt_tokens)

    @property
    def first_logprob(self) -> int | None:
        """First prompt position whose log-prob is still wanted."""
        if self.request.logprob_start_len < 0:
            return None
        position = self.request.logprob_start_len + len(self.input_logprobs)
        return position if position < self.prompt_tokens else None

    def append(
        self, token: int, logprob: float, logprob_original: float, version: str, decoder: Decoder | None
    ) -> None:
        """Take one sampled token, and finish where it ends the request."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.logprobs_original.append(logprob_original)
        self.versions.append(version)
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif sampling.stop and (matched := self._matched_stop(decoder)) is not None:
            self.finish_reason = {"type": "stop", "matched": matched}
        elif self.remaining <= 0:
            self.finish_reason = {"type": "length", "length": sampling.max_new_tokens}

    def _matched_stop(self, decoder: Decoder | None) -> str | None:
        assert decoder is not None
        sampling = self.request.sampling
        # A stop string of n bytes is at most n tokens; one more for a token that starts before it.
        tail = max(len(stop.encode()) for stop in sampling.stop) + 1
        text = decoder.decode(self.output_ids[-tail:], skip_special_tokens=False)
        return next((stop for stop in sampling.stop if stop in text), None)

    def abort(self, message: str) -> None:
        """Finish now with the tokens there are."""
        self.finish_reason = {"type": "abort", "message": message}

    def answer(self, version: str, decoder: Decoder | None) -> dict[str, Any]:
        """Return the body of ``/generate`` as of now (SGLang's fields)."""
        request, output_ids = self.request, self.output_ids
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(output_ids),
            "cached_tokens": self.cached_tokens or 0,
            "weight_version": self.versions[-1] if self.versions else version,
            "weight_versions": version_spans(self.versions),
            "num_retractions": self.retractions,
        }
        if request.return_logprob:
            pairs = zip(self.logprobs, output_ids, strict=True)
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
            pairs = zip(self.logprobs_original, output_ids, strict=True)
            meta["output_token_logprobs_original"] = [(logprob, token, None) for logprob, token in pairs]
            meta["input_token_logprobs"] = self.input_logprobs
            meta["logprob_temperature"] = request.logprob_temperature
            if request.top_logprobs_num:
                meta["output_top_logprobs"] = self.top_logprobs
                meta["input_top_logprobs"] = self.input_top_logprobs
            if request.token_ids_logprob:
                meta["output_token_ids_logprobs"] = self.chosen_logprobs
                meta["input_token_ids_logprobs"] = self.input_chosen_logprobs
        if request.return_routed_experts and self.routes is not None:
            routes = self.routes[request.routed_experts_start_len : max(len(self.ids) - 1, 0)]
            meta["routed_experts_shape"] = list(routes.shape)
            meta["routed_experts"] = base64.b64encode(routes.astype("<i4").tobytes()).decode()
        body: dict[str, Any] = {"output_ids": output_ids, "meta_info": meta}
        if decoder is not None:
            body["text"] = self._text(decoder)
        return body

    def _text(self, decoder: Decoder) -> str:
        sampling = self.request.sampling
        text = decoder.decode(self.output_ids, skip_special_tokens=sampling.skip_special_tokens)
        matched = (self.finish_reason or {}).get("matched")
        if isinstance(matched, str) and not sampling.no_stop_trim:
            return text[: text.find(matched)] if matched in text else text
        return text


def version_spans(versions: list[str]) -> list[dict[str, Any]]:
    """Return runs of equal versions as ``{version, start, end}`` over output positions, ``end`` exclusive."""
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans
