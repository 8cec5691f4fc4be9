"""One generation out of several requests: what an engine was made to abort goes on with what it had sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from miles_core.contracts.engines import Generation, Sampling
from miles_core.data.seeds import derive_seed
from miles_core.errors import EngineError

__all__ = ["joined", "remainder"]


def remainder(sampling: Sampling, sampled: int) -> Sampling:
    """How to sample behind `sampled` tokens of an interrupted generation: what is left of the limit, under a seed that
    is a function of the seed and of where it goes on. An abort before the first token changes nothing."""
    if sampled == 0:
        return sampling
    seed = None if sampling.seed is None else derive_seed(sampling.seed, "continued", sampled)
    return dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - sampled, seed=seed)


def joined(parts: Sequence[Generation], sampling: Sampling, decode: Callable[[Sequence[int]], str]) -> Generation:
    """The parts as the one generation that was asked for; part k was sent the prompt and the tokens of those before.

    Ids, log-probs, versions and text are concatenated. Cached tokens are those of the first part that sampled, cut to
    the prompt: later ones found the first's own tokens in the cache. `request_id` names the requests, joined by "+".
    An engine looks for stop strings in what one request sampled; one that straddles a cut is found here, by the rule of
    the engine, and what was sampled behind it is left out. Raises `EngineError` for a missing row of routed experts.
    """
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0], parts[-1]
    ids = np.concatenate([part.token_ids for part in parts])
    reason = last.finish_reason
    if reason == "abort" and len(ids) >= sampling.max_new_tokens:
        reason = "length"
    sampler = next((part for part in parts if len(part.token_ids)), first)
    routes, routed_start = _joined_routes(parts)
    whole = Generation(
        token_ids=ids,
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=reason,
        engine=last.engine,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=min(sampler.cached_tokens, first.prompt_tokens),
        started=first.started,
        finished=last.finished,
        text="".join(part.text for part in parts),
        routed_experts=routes,
        routed_start=routed_start,
        request_id="+".join(part.request_id for part in parts),
    )
    stop = _straddling_stop(parts, ids, sampling.stop, decode)
    return whole if stop is None else _cut(whole, stop, decode)


def _joined_routes(parts: Sequence[Generation]) -> tuple[NDArray[np.int32] | None, int]:
    """Rows by position. A row that an earlier part has stays: under it the next token was sampled. The last token of a
    part has routed nothing yet; its row comes with the next part, as that part's first."""
    rows: list[NDArray[np.int32]] = []
    start = covered = 0
    for part in parts:
        routes = part.routed_experts
        if not len(part.token_ids):
            continue
        if routes is None:
            if rows:
                raise EngineError(f"{part.engine}: routed experts came with one part of a generation and not with all")
            continue
        if not rows:
            start = covered = part.routed_start
        end = part.routed_start + len(routes)
        needed = part.prompt_tokens + len(part.token_ids) - 1
        if part.routed_start > covered or end != needed:
            raise EngineError(
                f"{part.engine}: routed experts cover positions {part.routed_start} up to {end}, but rows {covered} up "
                f"to {needed} are needed to go on after an abort; a missing row is never padded"
            )
        rows.append(routes[covered - part.routed_start :])
        covered = end
    return (np.concatenate(rows) if rows else None), start


def _straddling_stop(
    parts: Sequence[Generation],
    ids: NDArray[np.int32],
    stops: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> int | None:
    """Number of tokens up to and including the one that completes a stop string across a cut; None without one."""
    if not stops:
        return None
    tail = max(len(stop.encode()) for stop in stops) + 1  # a string of n bytes is at most n tokens, and one before it
    for cut in np.cumsum([len(part.token_ids) for part in parts])[:-1].tolist():
        for end in range(cut + 1, min(cut + tail, len(ids)) + 1):
            text = decode(ids[max(0, end - tail) : end].tolist())
            if any(stop in text for stop in stops):
                return end
    return None


def _cut(whole: Generation, count: int, decode: Callable[[Sequence[int]], str]) -> Generation:
    routes = whole.routed_experts
    if routes is not None:
        routes = routes[: whole.prompt_tokens + count - 1 - whole.routed_start]
    return dataclasses.replace(
        whole,
        token_ids=whole.token_ids[:count],
        logprobs=whole.logprobs[:count],
        versions=whole.versions[:count],
        finish_reason="stop",
        text=decode(whole.token_ids[:count].tolist()),
        routed_experts=routes,
    )
