"""Log-probs of given tokens under what an engine serves: SGLang's `/generate` with `logprob_start_len = 0`.

Engines score at temperature 1. Where another one is wanted, the request says so (`logprob_temperature`, which the
embedded engine knows), and the answer must say it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles_core.errors import EngineError
from miles_core.http import JsonHttp

__all__ = ["TokenScores", "score_tokens"]

_AT_ONCE = 32
"""Sequences of one request."""


class TokenScores(NamedTuple):
    """Of one sequence of T tokens: `logprobs` float32 [T]; `top_ids` int32 and `top_logprobs` float32 [T, k] of the k
    likeliest tokens in place of each, None unless asked for. Nothing predicts the first token: its numbers are 0."""

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None


async def score_tokens(
    http: JsonHttp,
    urls: Sequence[str],
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
) -> list[TokenScores]:
    """Natural log-prob of every token given those before it, and those of the `top_k` likeliest tokens in its place.

    The engine must have room for one token more than the longest sequence. Raises `EngineError`, also when the engine
    does not say that it scored at `temperature`.
    """
    parts = [sequences[start : start + _AT_ONCE] for start in range(0, len(sequences), _AT_ONCE)]
    body: dict[str, Any] = {
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if top_k:
        body["top_logprobs_num"] = top_k
    if temperature != 1.0:
        body["logprob_temperature"] = temperature
    answers = await asyncio.gather(
        *(_score(http, urls[index % len(urls)], part, body) for index, part in enumerate(parts))
    )
    return [scores for part in answers for scores in part]


async def _score(
    http: JsonHttp, url: str, sequences: Sequence[Sequence[int]], body: Mapping[str, Any]
) -> list[TokenScores]:
    ids = [[int(token) for token in sequence] for sequence in sequences]
    answer = await http.call("POST", f"{url}/generate", {"input_ids": ids, **body})
    if not isinstance(answer, list) or len(answer) != len(sequences):
        raise EngineError(f"{url}/generate: {len(sequences)} sequences got the answer {str(answer)[:300]}")
    return [_scores(url, one, own, body) for one, own in zip(answer, ids, strict=True)]


def _scores(url: str, answer: Any, ids: Sequence[int], body: Mapping[str, Any]) -> TokenScores:
    temperature = body.get("logprob_temperature", 1.0)
    width = int(body.get("top_logprobs_num", 0))
    try:
        meta = answer["meta_info"]
        logged, logprobs = _entries(meta["input_token_logprobs"])
        tops = [_entries(row) for row in meta["input_top_logprobs"][1:]] if width else []
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{url}: an answer without log-probs of the input: {str(answer)[:300]}") from error
    if logged != ids:
        raise EngineError(f"{url}: the log-probs are of other tokens than those that were sent")
    if temperature != 1.0 and meta.get("logprob_temperature") != temperature:
        raise EngineError(
            f"{url}: asked for log-probs at temperature {temperature}, and the answer does not say that they are; "
            "sample at temperature 1.0, or serve the teacher by the embedded engine"
        )
    column = _finite(url, [0.0, *logprobs[1:]], "token")
    if not width:
        return TokenScores(column)
    if any(len(top) != width for top, _ in tops) or len(tops) != len(ids) - 1:
        raise EngineError(f"{url}: not {width} likeliest tokens in place of each of {len(ids)}")
    zeros = [0] * width
    return TokenScores(
        column,
        np.array([zeros, *(top for top, _ in tops)], np.int32),
        _finite(url, [zeros, *(values for _, values in tops)], "likeliest tokens in place of token"),
    )


def _entries(triples: Sequence[Sequence[Any]]) -> tuple[list[int], list[Any]]:
    """Ids and log-probs of [log-prob, id, text] entries."""
    return [int(triple[1]) for triple in triples], [triple[0] for triple in triples]


def _finite(url: str, numbers: Sequence[Any], what: str) -> NDArray[np.float32]:
    column = np.array(numbers, np.float32)
    if not np.isfinite(column).all():
        raise EngineError(f"{url}: log-prob of {what} {int(np.argwhere(~np.isfinite(column))[0][0])} is not finite")
    return column
