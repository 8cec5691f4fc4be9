"""The engine client: SGLang's native `/generate`, token ids in, sampled ids with log-probs and versions out.

One client serves the embedded engine and SGLang. Requests are streamed: those that travel together are answered each
when it is finished.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson

from miles_core.contracts.engines import Generation, OnTokens, PauseMode, Sampling, TokenIds
from miles_core.engines.prompts import PromptJson
from miles_core.engines.wire import parse_generation, sampling_params
from miles_core.errors import EngineError, EngineRefusal
from miles_core.http import JsonHttp, check_status
from miles_core.routing.connections import Connections
from miles_core.routing.wire import BodyExchange, Exchange, Request

__all__ = ["EngineConnection"]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Ask:
    """A generation on its way: the request's own fields, and the future that its answer resolves."""

    request_id: str
    input_ids: TokenIds
    params: dict[str, Any]
    priority: int
    started: float
    answer: asyncio.Future[dict[str, Any]]
    on_tokens: OnTokens | None
    routing_key: str


class EngineConnection:
    """One engine by URL.

    Generations that are asked for in the same turn of the event loop travel in one HTTP request: the sixty-four
    episodes of a step cost one exchange, and each of them still gets its answer the moment that it is finished. Through
    a router (`miles_core.routing`) each travels by itself, with its session's routing key.
    """

    def __init__(
        self,
        url: str,
        http: JsonHttp,
        *,
        routed_experts: bool = False,
        experts_per_token: int = 0,
        vocabulary: int | None = None,
        router: bool = False,
    ) -> None:
        self._router = router
        self.url = url.rstrip("/")
        self._vocabulary = vocabulary
        self._experts_per_token = experts_per_token
        self.prefix_key = ""
        """Only prefixes that were computed under the same key are taken from the engine's cache. It is the version: an
        in-place pause keeps the keys and values of other weights, which nothing new may start from."""
        self._open: set[asyncio.Future[dict[str, Any]]] = set()
        self._http = http
        self._routed_experts = routed_experts
        self._prompts = PromptJson()
        self._connections = Connections(BodyExchange, connect_timeout=10.0)
        self._target = f"{urlsplit(self.url).path}/generate".encode()
        self._closed = False
        self._asked: list[_Ask] = []
        self._exchanges: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        input_ids: TokenIds,
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample a continuation. `on_tokens(ids)` is called with all ids so far as they come; what it raises ends this
        request. When the caller is cancelled, the request is aborted in the engine. Raises `EngineRefusal`,
        `EngineError`, `OSError`, or `Retryable` (502 to 504)."""
        self._check_ids(input_ids)
        loop = asyncio.get_running_loop()
        ask = _Ask(
            request_id=secrets.token_hex(16),
            input_ids=input_ids if isinstance(input_ids, list | np.ndarray) else [int(i) for i in input_ids],
            params=sampling_params(sampling, told=on_tokens is not None),
            priority=priority,
            started=time.time(),
            answer=loop.create_future(),
            on_tokens=on_tokens,
            routing_key=routing_key,
        )
        if not self._asked:
            loop.call_soon(self._send)
        self._asked.append(ask)
        self._open.add(ask.answer)
        try:
            answer = await ask.answer
        except asyncio.CancelledError:
            self._in_background(self._abort(ask.request_id))
            raise
        finally:
            self._open.discard(ask.answer)
        return parse_generation(
            answer,
            engine=self.url,
            request_id=ask.request_id,
            started=ask.started,
            finished=time.time(),
            experts_per_token=self._experts_per_token,
        )

    def _check_ids(self, input_ids: TokenIds) -> None:
        """An id outside the vocabulary ends an SGLang server, and every request in it: it never leaves us."""
        ids = np.asarray(input_ids)
        if self._vocabulary is None or not len(ids):
            return
        if np.minimum.reduce(ids) < 0 or np.maximum.reduce(ids) >= self._vocabulary:
            outside = np.flatnonzero((ids < 0) | (ids >= self._vocabulary))
            raise EngineRefusal(
                f"{self.url}: input_ids[{outside[0]}] is {ids[outside[0]]}, outside the vocabulary "
                f"(0 to {self._vocabulary - 1})"
            )

    def fail(self, error: Exception) -> None:
        """End every open `generate` with `error`, whatever the engine still answers."""
        for answer in self._open:
            if not answer.done():
                answer.set_exception(error)

    def _send(self) -> None:
        asked = [ask for ask in self._asked if not ask.answer.done()]
        self._asked = []
        for together in [[ask] for ask in asked] if self._router else [asked]:
            if together:
                self._in_background(self._exchange(together))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)

    async def _exchange(self, asked: Sequence[_Ask]) -> None:
        """One HTTP request for all of `asked`; whatever happens, every future of theirs is resolved."""
        try:
            await self._stream(asked)
            _fail(asked, EngineError(f"{self.url}/generate: the stream ended before the answer was finished"))
        except EngineRefusal as refusal:
            if len(asked) == 1:
                _fail(asked, refusal)
            else:  # one bad request must not speak for the others: each asks for itself
                await asyncio.gather(*(self._exchange([ask]) for ask in asked))
        except BaseException as error:
            _fail(asked, error)
            if not isinstance(error, Exception):
                raise

    async def _stream(self, asked: Sequence[_Ask]) -> None:
        if self._closed:
            raise EngineError("the connection pool is closed: nothing may be asked of an engine any more")
        headers = [(b"content-type", b"application/json")]
        if self._router:
            headers.append((b"idempotency-key", asked[0].request_id.encode()))
            if asked[0].routing_key:
                headers.append((b"x-smg-routing-key", asked[0].routing_key.encode()))
        request = Request(method=b"POST", target=self._target, headers=headers, body=b"")
        answers = _Answers(asked, self._take)
        body = orjson.dumps(self._body(asked))
        await self._connections.send(self.url, request, body, answers, on_connection=answers.over)
        check_status(f"POST {self.url}/generate", answers.status, b"".join(answers.refusal))

    def _take(self, data: bytes, asked: Sequence[_Ask], open_asks: dict[str, _Ask]) -> None:
        """One event of the stream: an answer, or tokens on the way to one."""
        answer = orjson.loads(data)
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        request_id = meta.get("id") if isinstance(meta, dict) else None
        named = open_asks.get(str(request_id)) or (asked[0] if len(asked) == 1 else None)
        if named is None:
            raise EngineError(f"{self.url}/generate: an answer to no request of ours: {str(answer)[:300]}")
        if meta is None or "error" in answer or meta.get("finish_reason") is not None:
            open_asks.pop(named.request_id, None)
            if not named.answer.done():
                named.answer.set_result(answer)
        elif named.on_tokens is not None and not named.answer.done():
            try:
                named.on_tokens(answer.get("output_ids") or ())
            except Exception as error:
                named.answer.set_exception(error)
                self._in_background(self._abort(named.request_id))

    def _body(self, asked: Sequence[_Ask]) -> dict[str, Any]:
        body: dict[str, Any] = {"return_logprob": True, "stream": True}
        if self._routed_experts:
            body["return_routed_experts"] = True
        if self.prefix_key:
            body["extra_key"] = self.prefix_key
        if len(asked) == 1:
            (ask,) = asked
            fields: dict[str, Any] = {
                "rid": ask.request_id,
                "input_ids": self._prompts.encode(ask.routing_key, ask.input_ids),
                "sampling_params": ask.params,
                "priority": ask.priority,
            }
        else:
            fields = {
                "rid": [ask.request_id for ask in asked],
                "input_ids": [self._prompts.encode(ask.routing_key, ask.input_ids) for ask in asked],
                "sampling_params": [ask.params for ask in asked],
                "priority": [ask.priority for ask in asked],
            }
        return {**body, **fields}

    async def _abort(self, request_id: str) -> None:
        """Tell the engine to stop working for nobody. An engine that is gone has stopped already."""
        try:
            await self._http.call("POST", f"{self.url}/abort_request", {"rid": request_id}, deadline=2.0)
        except EngineError:
            return

    async def abort_all(self, *, deadline: float = 60.0) -> None:
        """Let everything that the engine works on end now, with what it has."""
        await self._http.call("POST", f"{self.url}/abort_request", {"abort_all": True}, deadline=deadline)

    async def close(self, *, grace: float = 2.0) -> None:
        """Let what is on its way end (aborts of cancelled requests, above all), and cancel the rest after `grace` s."""
        self._closed = True
        if self._exchanges:
            await self._finish(grace)
        self._connections.close()
        await asyncio.sleep(0)  # what was closed is told so by the event loop's next turn

    async def _finish(self, grace: float) -> None:
        _, late = await asyncio.wait(self._exchanges, timeout=grace)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def health(self, *, deadline: float = 5.0) -> None:
        await self._http.call("GET", f"{self.url}/health", deadline=deadline)

    async def server_info(self, *, deadline: float = 30.0) -> Mapping[str, Any]:
        info: Mapping[str, Any] = await self._http.call("GET", f"{self.url}/server_info", deadline=deadline)
        return info

    async def pause(self, mode: PauseMode) -> None:
        await self._http.call("POST", f"{self.url}/pause_generation", {"mode": mode}, deadline=60.0)

    async def resume(self) -> None:
        await self._http.call("POST", f"{self.url}/continue_generation", {}, deadline=60.0)

    async def flush(self) -> None:
        await self._http.call("POST", f"{self.url}/flush_cache", {}, deadline=60.0)


def _fail(asked: Sequence[_Ask], error: BaseException) -> None:
    """Resolve what is still open."""
    for ask in asked:
        if not ask.answer.done():
            ask.answer.set_exception(error if isinstance(error, Exception) else EngineError("cancelled"))


class _Answers:
    """Receives the stream of one exchange, and takes it apart into events (WHATWG HTML, section 9.2). Lines may be
    of any length; what follows `[DONE]` is not looked at."""

    def __init__(self, asked: Sequence[_Ask], take: Callable[[bytes, Sequence[_Ask], dict[str, _Ask]], None]) -> None:
        self.status = 0
        self.refusal: list[bytes] = []
        self._asked = asked
        self._open = {ask.request_id: ask for ask in asked}
        self._take = take
        self._rest = b""
        self._done = False
        self._connection: Exchange | None = None

    def over(self, connection: Exchange) -> None:
        """It comes over this connection."""
        self._connection = connection

    def begin(self, status: int) -> bool:
        self.status = status
        return True

    def take(self, data: bytes) -> None:
        if self.status >= 400:
            self.refusal.append(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._done or not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                self._done = True
                continue
            try:
                self._take(event, self._asked, self._open)
            except Exception as error:
                assert self._connection is not None
                self._done = True
                self._connection.fail(error)
