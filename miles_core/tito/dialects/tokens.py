"""Tokens in, tokens out (`/inference/v1/generate`, as vLLM has it): for clients that render messages themselves.

A request holds the whole prompt as ids. A turn whose ids the prompt repeats is extended by it, so the session's tree,
its export and the audit hold for such clients too. `logprobs.content[i].token` is `token_id:ID`, as in vLLM;
`choices[0].versions` is our own: the policy version that sampled each id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from miles_core.tito.dialects.base import (
    StreamWriter,
    expect,
    get,
    limit,
    numbers,
    one_of_one,
    refuse_fields,
    stop_strings,
)
from miles_core.tito.turns import BadRequestError, Reply, TurnRequest

__all__ = ["TokenDialect"]

_REFUSED: dict[str, Any] = {"features": None, "content_parts": None, "stream": False, "kv_transfer_params": None}
_REFUSED_SAMPLING: dict[str, Any] = {
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "guided_decoding": None,
    "logits_processors": None,
    "prompt_logprobs": None,
    "ignore_eos": False,
    "min_tokens": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
_MAX_ID = np.iinfo(np.int32).max


class TokenDialect:
    """See `Dialect`. There is no streaming: a client that wants tokens wants all of them."""

    late = False

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """See `Dialect.read`."""
        refuse_fields(body, _REFUSED)
        params = get(body, "sampling_params", dict, {})
        refuse_fields(params, _REFUSED_SAMPLING)
        one_of_one(params, "n", "best_of")
        ids = _ids(body.get("token_ids"), "token_ids")
        if not ids:
            raise BadRequestError("token_ids: there is no token to go on from")
        return TurnRequest(
            messages=(),
            ids=np.array(ids, np.int32),
            model=get(body, "model", str, ""),
            max_tokens=limit(params, "max_tokens"),
            stop=stop_strings(params.get("stop"), "sampling_params.stop"),
            stop_token_ids=tuple(_ids(get(params, "stop_token_ids", list, []), "sampling_params.stop_token_ids")),
            **numbers(params),
        )

    def answer(self, request: TurnRequest, reply: Reply) -> Mapping[str, Any]:
        """See `Dialect.answer`."""
        ids = [i for g in reply.generations for i in g.token_ids.tolist()]
        logprobs = [x for g in reply.generations for x in g.logprobs.tolist()]
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "versions": [v for g in reply.generations for v in g.versions.tolist()],
            "finish_reason": reply.finish_reason,
        }
        return {
            "request_id": request.turn_id,
            "model": request.model,
            "choices": [choice],
            "prompt_logprobs": None,
            "usage": {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
            },
        }

    def stream(self, request: TurnRequest) -> StreamWriter:
        raise AssertionError("`read` refuses streams")

    def error(self, status: int, message: str, code: str) -> Mapping[str, Any]:
        """See `Dialect.error`."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _ids(value: Any, where: str) -> list[int]:
    """Token ids. Raises `BadRequestError` for what is none."""
    ids: list[int] = expect(value, list, where)
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= _MAX_ID:
            raise BadRequestError(f"{where}[{index}]: {token!r} is no token id; allowed: integers, 0 to {_MAX_ID}")
    return ids
