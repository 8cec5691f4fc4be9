"""The engine client: SGLang's native `/generate`, token ids in, sampled ids with log-probs and versions out.

One client serves the embedded engine and SGLang. Requests are streamed: the answer's headers say that the engine has
queued the request, which lets a synchronous step admit its requests in submission order.
"""

from __future__ import annotations

import base64
import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from miles_core.contracts.engines import Generation, PauseMode, Sampling
from miles_core.errors import EngineError
from miles_core.http import JsonHttp, check_status

__all__ = ["EngineConnection", "parse_generation"]


class EngineConnection:
    """One engine by URL."""

    def __init__(self, url: str, http: JsonHttp, *, routed_experts: bool = False) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self._routed_experts = routed_experts

    async def generate(
        self, input_ids: Sequence[int], sampling: Sampling, *, priority: int = 0, on_queued: Any = None
    ) -> Generation:
        """Sample a continuation. `on_queued()` is called once the engine has taken the request. When the caller is
        cancelled, the request is aborted in the engine. Raises `EngineRefusal`, `EngineError` or `aiohttp.ClientError`."""
        request_id = uuid.uuid4().hex
        body: dict[str, Any] = {
            "rid": request_id,
            "input_ids": [int(i) for i in input_ids],
            "sampling_params": _sampling_params(sampling),
            "return_logprob": True,
            "stream": True,
            "priority": priority,
        }
        if self._routed_experts:
            body["return_routed_experts"] = True
        started = time.time()
        session = await self._http.session()
        finished = False
        try:
            async with session.post(f"{self.url}/generate", json=body) as response:
                if response.status >= 400:
                    check_status(f"POST {self.url}/generate", response.status, await response.read())
                if on_queued is not None:
                    on_queued()
                last = b""
                async for line in response.content:
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            finished = True
                            break
                        last = data
        finally:
            if not finished:
                await self._abort(request_id)
        if not finished or not last:
            raise EngineError(f"{self.url}/generate: the stream of request {request_id} ended before [DONE]")
        answer = orjson.loads(last)
        generation = parse_generation(answer, engine=self.url, started=started, finished=time.time())
        return dataclasses.replace(generation, request_id=request_id)

    async def _abort(self, request_id: str) -> None:
        """Tell the engine to stop working for nobody. An engine that is gone has stopped already."""
        try:
            await self._http.call("POST", f"{self.url}/abort_request", {"rid": request_id}, deadline=2.0)
        except EngineError:
            return

    async def health(self, *, deadline: float = 5.0) -> None:
        await self._http.call("GET", f"{self.url}/health", deadline=deadline)

    async def server_info(self) -> Mapping[str, Any]:
        info: Mapping[str, Any] = await self._http.call("GET", f"{self.url}/server_info", deadline=30.0)
        return info

    async def pause(self, mode: PauseMode) -> None:
        await self._http.call("POST", f"{self.url}/pause_generation", {"mode": mode}, deadline=60.0)

    async def resume(self) -> None:
        await self._http.call("POST", f"{self.url}/continue_generation", {}, deadline=60.0)

    async def flush(self) -> None:
        await self._http.call("POST", f"{self.url}/flush_cache", {}, deadline=60.0)


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
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
    return params


def parse_generation(answer: Any, *, engine: str, started: float, finished: float) -> Generation:
    """Read a final `/generate` answer. Raises `EngineError` when it is not one: garbage never becomes a sample."""
    try:
        if "error" in answer:
            raise EngineError(f"{engine}: {answer['error']}")
        meta = answer["meta_info"]
        token_ids = np.array(answer["output_ids"], np.int32)
        triples = meta["output_token_logprobs"]
        logprobs = np.array([t[0] for t in triples], np.float32)
        logged = np.array([t[1] for t in triples], np.int32)
        reason = meta["finish_reason"]["type"]
        prompt_tokens, cached = int(meta["prompt_tokens"]), int(meta.get("cached_tokens") or 0)
        versions = _versions(meta, len(token_ids))
        routes = _routes(meta)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{engine}: an answer that is not a generation ({error!r}): {str(answer)[:500]}") from error
    if len(logprobs) != len(token_ids) or not np.array_equal(logged, token_ids):
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
        text=answer.get("text") or "",
        routed_experts=routes,
    )


def _versions(meta: Mapping[str, Any], count: int) -> NDArray[np.int32]:
    """Version of each sampled token, from the engine's spans where it reports them."""
    spans = meta.get("weight_versions")
    if not spans:
        return np.full(count, int(meta["weight_version"]), np.int32)
    versions = np.full(count, -1, np.int32)
    for span in spans:
        versions[int(span["start"]) : int(span["end"])] = int(span["version"])
    if (versions < 0).any():
        raise ValueError(f"weight_versions {spans} do not cover {count} tokens")
    return versions


def _routes(meta: Mapping[str, Any]) -> NDArray[np.int32] | None:
    encoded = meta.get("routed_experts")
    if encoded is None:
        return None
    shape = meta.get("routed_experts_shape")
    flat = np.frombuffer(base64.b64decode(encoded), np.int32)
    return flat.reshape(shape) if shape is not None else flat.reshape(-1, 1, 1)
