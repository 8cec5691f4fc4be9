"""Log-probs of given tokens under what an engine serves: SGLang's `/generate` with `logprob_start_len = 0`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.errors import EngineError
from miles_core.http import JsonHttp

__all__ = ["score_tokens"]

_AT_ONCE = 32
"""Sequences of one request."""


async def score_tokens(
    http: JsonHttp, urls: Sequence[str], sequences: Sequence[Sequence[int]]
) -> list[NDArray[np.float32]]:
    """Log-prob (natural log, temperature 1) of every token given those before it, float32 [T] each; entry 0 is 0.

    The engine must have room for one token more than the longest sequence. Raises `EngineError`.
    """
    parts = [sequences[start : start + _AT_ONCE] for start in range(0, len(sequences), _AT_ONCE)]
    answers = await asyncio.gather(*(_score(http, urls[index % len(urls)], part) for index, part in enumerate(parts)))
    return [column for part in answers for column in part]


async def _score(http: JsonHttp, url: str, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    body = {
        "input_ids": [[int(token) for token in sequence] for sequence in sequences],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await http.call("POST", f"{url}/generate", body)
    if not isinstance(answer, list) or len(answer) != len(sequences):
        raise EngineError(f"{url}/generate: {len(sequences)} sequences got the answer {str(answer)[:300]}")
    return [_column(url, one, sequence) for one, sequence in zip(answer, sequences, strict=True)]


def _column(url: str, answer: Any, sequence: Sequence[int]) -> NDArray[np.float32]:
    try:
        triples = answer["meta_info"]["input_token_logprobs"]
        logged = [int(triple[1]) for triple in triples]
        column = np.array([0.0, *(float(triple[0]) for triple in triples[1:])], np.float32)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{url}: an answer without log-probs of the input: {str(answer)[:300]}") from error
    if logged != [int(token) for token in sequence]:
        raise EngineError(f"{url}: the log-probs are of other tokens than those that were sent")
    if not np.isfinite(column).all():
        raise EngineError(f"{url}: log-prob of token {int(np.flatnonzero(~np.isfinite(column))[0])} is not finite")
    return column
