"""SGLang's `/generate` as data: what is asked, and what an answer means. No input or output."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.engines import Generation, Sampling
from miles_core.errors import EngineError
from miles_core.http import Retryable

__all__ = ["UNPUBLISHED", "UnpublishedWeights", "parse_generation", "sampling_params"]

UNPUBLISHED = "unpublished"
"""What a launched server reports as its version before anything was published to it."""


class UnpublishedWeights(Retryable):
    """The engine sampled with weights that nobody published: it was started again, and holds those of its model."""


def sampling_params(sampling: Sampling, *, told: bool) -> dict[str, Any]:
    """`sampling_params` of a streamed request. Unless somebody is `told` of tokens as they come, the engine need not
    make an event of them before the last."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if not told:
        params["stream_interval"] = sampling.max_new_tokens
    return params


def parse_generation(
    answer: Any, *, engine: str, started: float, finished: float, request_id: str = "", experts_per_token: int = 0
) -> Generation:
    """Read a final `/generate` answer. `experts_per_token` is the model's, for routes that come without their shape
    (SGLang's). Raises `EngineError` when it is no answer: garbage never becomes a sample; `UnpublishedWeights` when the
    engine holds weights that nobody published."""
    try:
        if "error" in answer:
            raise EngineError(f"{engine}: {answer['error']}")
        meta = answer["meta_info"]
        ids = answer["output_ids"]
        token_ids = np.fromiter(ids, np.int32, len(ids))
        triples = meta["output_token_logprobs"]
        logprobs = np.fromiter([t[0] for t in triples], np.float32, len(triples))
        logged = [t[1] for t in triples]
        reason = meta["finish_reason"]["type"]
        prompt_tokens, cached = int(meta["prompt_tokens"]), int(meta.get("cached_tokens") or 0)
        versions = _versions(meta, len(token_ids))
        routes = _routes(meta, prompt_tokens + len(token_ids) - 1, experts_per_token)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineError(f"{engine}: an answer that is not a generation ({error!r}): {str(answer)[:500]}") from error
    if logged != ids:
        raise EngineError(
            f"{engine}: {len(token_ids)} sampled ids but log-probs of {len(logprobs)} tokens that do not match them"
        )
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"{engine}: log-prob of sampled token {int(np.flatnonzero(~np.isfinite(logprobs))[0])} is not finite"
        )
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"{engine}: unknown finish reason {reason!r}; expected stop, length or abort")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=reason,
        engine=engine,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        started=started,
        finished=finished,
        request_id=request_id,
        text=answer.get("text") or "",
        routed_experts=routes,
    )


def _versions(meta: Mapping[str, Any], count: int) -> NDArray[np.int32]:
    """Version of each sampled token, from the engine's spans where it reports them."""
    spans = meta.get("weight_versions")
    if not spans:
        return np.full(count, _version(meta["weight_version"]), np.int32)
    versions = np.full(count, -1, np.int32)
    for span in spans:
        versions[int(span["start"]) : int(span["end"])] = _version(span["version"])
    if (versions < 0).any():
        raise ValueError(f"weight_versions {spans} do not cover {count} tokens")
    return versions


def _version(reported: Any) -> int:
    text = str(reported)
    if not text.isdigit():
        raise UnpublishedWeights(f"the engine reports version {text!r}: nothing was published to it")
    return int(text)


def _routes(meta: Mapping[str, Any], rows: int, experts_per_token: int) -> NDArray[np.int32] | None:
    encoded = meta.get("routed_experts")
    if encoded is None:
        return None
    shape = meta.get("routed_experts_shape")
    flat = np.frombuffer(base64.b64decode(encoded), np.int32)
    if shape is not None:
        return flat.reshape(shape)
    if not experts_per_token:
        raise ValueError("routed experts came without their shape, and the number of experts a token is not known")
    return flat.reshape(rows, -1, experts_per_token)
