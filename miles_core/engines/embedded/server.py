"""HTTP in front of the engine: SGLang's paths and fields. The event loop only moves bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from .engine import StepError
from .protocol import BadRequestError, GenerateRequest, Limits, SamplingParams, parse_generate
from .updates import WeightUpdates
from .weights import ChecksumError, WrongStateError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from starlette.requests import Request

    from .engine import Engine
    from .sequence import Sequence
    from .updates import Update
    from .weights import WeightStore

_STATUS = {BadRequestError: 400, ChecksumError: 409, WrongStateError: 409, StepError: 500}
_PAUSE_MODES = ("abort", "retract", "in_place")


class UnavailableError(Exception):
    """The engine holds no published weights yet (HTTP 503)."""


class Answers:
    """What the engine's thread says of some requests, for one coroutine to read. All that a step came to wakes the
    event loop once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._said: deque[tuple[Sequence, dict[str, Any] | StepError]] = deque()
        self._there = asyncio.Event()
        self._told = False

    def put(self, sequence: Sequence, answer: dict[str, Any] | StepError) -> None:
        """Call it in the engine's thread."""
        self._said.append((sequence, answer))
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._there.set)

    async def get(self) -> list[tuple[Sequence, dict[str, Any] | StepError]]:
        """All that was said since the last call; waits until there is something."""
        while not self._said:
            await self._there.wait()
            self._there.clear()
            self._told = False  # before the look: what is put from here on wakes this up again
        return [self._said.popleft() for _ in range(len(self._said))]


class EngineApp:
    """Routes over one engine.

    Args:
        engine: started.
        weights: the engine's weight store; staging reads it outside the engine's thread, generation goes on.
        limits: what requests are checked against.
        info: what ``/model_info`` answers beside the weight version.
    """

    def __init__(self, *, engine: Engine, weights: WeightStore, limits: Limits, info: Mapping[str, Any]) -> None:
        self._engine = engine
        self._weights = weights
        self._limits = limits
        self._info = dict(info)
        self._staging = asyncio.Lock()
        self._updates = WeightUpdates(engine, weights)
        both, post = ["GET", "POST"], ["POST"]
        self.app = Starlette(
            routes=[
                Route("/generate", self._endpoint(self.generate), methods=post),
                Route("/health", self._endpoint(self.health)),
                Route("/health_generate", self._endpoint(self.health_generate)),
                Route("/model_info", self._endpoint(self.model_info)),
                Route("/get_model_info", self._endpoint(self.model_info)),
                Route("/server_info", self._endpoint(self.server_info)),
                Route("/get_server_info", self._endpoint(self.server_info)),
                Route("/flush_cache", self._endpoint(self.flush_cache), methods=both),
                Route("/abort_request", self._endpoint(self.abort_request), methods=post),
                Route("/pause_generation", self._endpoint(self.pause_generation), methods=post),
                Route("/continue_generation", self._endpoint(self.continue_generation), methods=post),
                Route("/stage_weights", self._endpoint(self.stage_weights), methods=post),
                Route("/commit_weights", self._endpoint(self.commit_weights), methods=post),
                Route("/switch_weights", self._endpoint(self.switch_weights), methods=post),
                Route("/discard_weights", self._endpoint(self.discard_weights), methods=post),
                Route("/weights_checker", self._endpoint(self.weights_checker), methods=post),
                *(
                    Route(path, self._endpoint(self._update(call)), methods=post)
                    for path, call in self._updates.calls.items()
                ),
            ]
        )

    def _endpoint(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except (BadRequestError, ChecksumError, WrongStateError, StepError) as error:
                return _failure(_STATUS[type(error)], str(error))
            except UnavailableError as error:
                return _failure(503, str(error))

        return endpoint

    async def generate(self, request: Request) -> Response:
        """Sample from one prompt or several; see :mod:`.protocol` for the fields."""
        self._require_weights()
        requests, batched = parse_generate(await _body(request), self._limits)
        answers = Answers()
        self._engine.submit(requests, answers.put)
        if requests[0].stream:
            return StreamingResponse(self._stream(requests, answers, batched), media_type="text/event-stream")
        gone = asyncio.create_task(_disconnected(request))
        try:
            done: dict[int, dict[str, Any]] = {}
            failure: StepError | None = None
            left = len(requests)
            while left:
                getting = asyncio.create_task(answers.get())
                await asyncio.wait((getting, gone), return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    self._abort(requests)
                    return Response(status_code=499)
                for sequence, answer in getting.result():
                    left -= 1
                    if isinstance(answer, StepError):
                        failure = answer
                    else:
                        done[id(sequence.request)] = answer
            if failure is not None:
                raise failure
        finally:
            gone.cancel()
        bodies = [done[id(one)] for one in requests]
        return _json(bodies if batched else bodies[0])

    async def _stream(
        self,
        requests: list[GenerateRequest],
        answers: Answers,
        batched: bool,
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events with cumulative answers, as they come, those of one step together; those of a batch
        carry the `index` of their prompt. What is not finished is aborted when the reader goes away."""
        open_requests = {id(request): index for index, request in enumerate(requests)}
        try:
            while open_requests:
                events: list[bytes] = []
                for sequence, answer in await answers.get():
                    index = open_requests[id(sequence.request)]
                    if isinstance(answer, StepError):
                        answer = {"error": {"message": str(answer)}, "meta_info": {"id": sequence.request.rid}}
                        del open_requests[id(sequence.request)]
                    elif answer["meta_info"]["finish_reason"] is not None:
                        del open_requests[id(sequence.request)]
                    if batched:
                        answer["index"] = index
                    events += (b"data: ", orjson.dumps(answer), b"\n\n")
                yield b"".join(events)
            yield b"data: [DONE]\n\n"
        finally:
            if open_requests:
                self._abort([request for request in requests if id(request) in open_requests])

    def _abort(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._engine.call(lambda rid=request.rid: self._engine.abort(rid, "the client went away"))  # type: ignore[misc]

    async def health(self, _: Request) -> Response:
        """200 while the engine's thread lives."""
        return Response() if self._engine.alive else _failure(503, "the engine's thread has ended")

    async def health_generate(self, request: Request) -> Response:
        """200 after one token was sampled; while paused, after the engine's thread answered."""
        self._require_weights()
        if self._engine.pause_mode is not None:
            await self._call(lambda: None)
            return Response()
        answered: asyncio.Queue[dict[str, Any] | StepError] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        probe = GenerateRequest(
            rid="health",
            input_ids=(0,),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=1, sampling_seed=0),
            priority=-(2**31),
        )
        self._engine.submit([probe], lambda _, answer: loop.call_soon_threadsafe(answered.put_nowait, answer))
        answer = await answered.get()
        if isinstance(answer, StepError):
            raise answer
        return Response()

    async def model_info(self, _: Request) -> Response:
        """The model and the version it holds."""
        return _json({**self._info, "weight_version": self._engine.version})

    async def server_info(self, _: Request) -> Response:
        """Gauges and counters of :meth:`Engine.stats`."""
        return _json({**self._info, **await self._call(self._engine.stats)})

    async def flush_cache(self, _: Request) -> Response:
        """Forget cached prefixes."""
        await self._call(self._engine.flush_cache)
        return _json({"success": True})

    async def abort_request(self, request: Request) -> Response:
        """Abort by ``rid``, or everything with ``abort_all``; their requests answer with what they have."""
        body = await _object(request, {"rid", "abort_all", "abort_message"})
        rid, everything = body.get("rid"), body.get("abort_all", False)
        if not isinstance(everything, bool) or (not everything and not isinstance(rid, str)):
            raise BadRequestError('abort_request: {"rid": "…"} or {"abort_all": true} is required')
        message = str(body.get("abort_message") or "aborted by request")
        count = await self._call(lambda: self._engine.abort(None if everything else rid, message))
        return _json({"success": True, "aborted": count})

    async def pause_generation(self, request: Request) -> Response:
        """Stop stepping; ``mode`` says what happens to running requests. Answers when no step is under way."""
        mode = (await _object(request, {"mode"})).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise BadRequestError(f"mode: one of {', '.join(_PAUSE_MODES)}, not {mode!r}")
        await self._call(lambda: self._engine.pause(mode))
        return _json({"success": True, "mode": mode})

    async def continue_generation(self, _: Request) -> Response:
        """Go on after a pause."""
        await self._call(self._engine.resume)
        return _json({"success": True})

    async def stage_weights(self, request: Request) -> Response:
        """Map and verify a version beside the one in use; a later one replaces it."""
        body = await _object(request, {"path", "tensors", "weight_version"})
        path, version = body.get("path"), _version(body)
        if not isinstance(path, str):
            raise BadRequestError("path: the file with the tensors' bytes is required")
        async with self._staging:
            staged = await asyncio.to_thread(self._weights.stage, path, body.get("tensors"), version)
            self._engine.staged = staged
        return _json(
            {
                "success": True,
                "weight_version": version,
                "checksums": staged.checksums,
                "seconds": staged.seconds,
            }
        )

    async def commit_weights(self, request: Request) -> Response:
        """Serve the staged version; generation must be paused."""
        version = _version(await _object(request, {"weight_version"}))
        await self._call(lambda: self._engine.commit(version))
        return _json({"success": True, "weight_version": version})

    async def switch_weights(self, request: Request) -> Response:
        """Serve the staged version from the next step on, and answer with the checksums of what is in use then."""
        body = await _object(request, {"weight_version", "mode"})
        version, mode = _version(body), body.get("mode", "retract")
        if mode not in _PAUSE_MODES:
            raise BadRequestError(f"mode: one of {', '.join(_PAUSE_MODES)}, not {mode!r}")
        checksums = await self._call(lambda: self._engine.switch(version, mode))
        return _json({"success": True, "weight_version": version, "checksums": checksums})

    async def discard_weights(self, _: Request) -> Response:
        """Drop a staged version."""
        self._engine.staged = None
        return _json({"success": True, "weight_version": self._engine.version})

    def _update(self, call: Update) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            body = await _body(request)
            if not isinstance(body, dict):
                raise BadRequestError(f"the body must be a JSON object, not {type(body).__name__}")
            return _json({"success": True, "message": await call(body)})

        return handler

    async def weights_checker(self, request: Request) -> Response:
        """Checksums of the weights in use."""
        action = (await _object(request, {"action"})).get("action")
        if action != "checksum":
            raise BadRequestError(f"action: checksum, not {action!r}")
        checksums = await self._call(self._engine.checksums)
        return _json({"success": True, "weight_version": self._engine.version, "checksums": checksums})

    def _require_weights(self) -> None:
        if self._engine.version is None:
            raise UnavailableError(
                "this engine was started with --wait-for-weights and serves nothing before its first commit_weights"
            )

    async def _call(self, command: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._engine.call(command))


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def _failure(status: int, message: str) -> Response:
    return _json({"success": False, "error": {"message": message}}, status)


async def _body(request: Request) -> object:
    raw = await request.body()
    try:
        return orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error


async def _object(request: Request, known: set[str]) -> dict[str, Any]:
    body = await _body(request)
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, not {type(body).__name__}")
    if unknown := sorted(set(body) - known):
        raise BadRequestError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return body


def _version(body: Mapping[str, Any]) -> str:
    version = body.get("weight_version")
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise BadRequestError("weight_version: an integer or a string is required")
    return str(version)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
