"""The session server's HTTP side: one ASGI application, three dialects, one session a path.

| path | |
|---|---|
| `POST /sessions` | open a session; needs the admin token where the server has one |
| `GET /sessions/ID`, `DELETE /sessions/ID` | its state; end it |
| `POST /sessions/ID/export` | its trajectories, one Arrow IPC stream |
| `POST /sessions/ID/v1/chat/completions`, `…/v1/responses`, `…/v1/messages` | a turn |
| `POST /sessions/ID/inference/v1/generate` | a turn, tokens in and tokens out |
| `POST /sessions/ID/v1/messages/count_tokens`, `GET /sessions/ID/v1/models` | |
| `GET /health`, `GET /openapi.json` | |

`/v1/…` and `/inference/…` without a session's path take the id from the header `X-Session-ID`. A session's token goes
in `Authorization: Bearer` or `x-api-key`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from miles_core import __version__
from miles_core.errors import EngineError, EngineRefusal, EngineUnavailable
from miles_core.tito.dialects.anthropic import AnthropicDialect
from miles_core.tito.dialects.base import Dialect, expect, get
from miles_core.tito.dialects.chat import ChatDialect
from miles_core.tito.dialects.responses import ResponsesDialect
from miles_core.tito.dialects.tokens import TokenDialect
from miles_core.tito.export import PICKERS, Identity, export, to_ipc
from miles_core.tito.openapi import openapi_document
from miles_core.tito.sessions import Session
from miles_core.tito.settings import SessionSettings
from miles_core.tito.store import SessionStore
from miles_core.tito.streaming import Progress
from miles_core.tito.tree import TurnConflictError, TurnRefusedError
from miles_core.tito.turns import BadRequestError, Reply, TurnRequest

__all__ = ["SessionApp"]

_CHAT, _RESPONSES, _ANTHROPIC = ChatDialect(), ResponsesDialect(), AnthropicDialect()
_TURNS: dict[str, Dialect] = {
    "v1/chat/completions": _CHAT,
    "v1/responses": _RESPONSES,
    "v1/messages": _ANTHROPIC,
    "inference/v1/generate": TokenDialect(),
}
_GONE = (404, "no session of this id: it has ended, expired or never was", "session_not_found")


class HttpError(Exception):
    """An answer that is an error: status, message, code."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def http_error(error: BaseException) -> HttpError | None:
    """The answer that an exception of a turn means; None for one that must not happen."""
    match error:
        case HttpError():
            return error
        case BadRequestError():
            return HttpError(400, str(error), error.code)
        case TurnRefusedError():
            return HttpError(400, str(error), "context_length_exceeded")
        case TurnConflictError():
            return HttpError(409, str(error), "session_conflict")
        case EngineRefusal():
            return HttpError(400, f"the engine refused the request: {error}", "engine_refused")
        case EngineUnavailable():
            return HttpError(503, str(error), "engine_unavailable")
        case EngineError():
            return HttpError(502, str(error), "engine_error")
        case asyncio.CancelledError():
            return HttpError(*_GONE)
    return None


class SessionApp:
    """The ASGI application over a `SessionStore`.

    `settings` opens what `POST /sessions` asks for; None when sessions are opened in the process alone. `admin_token`
    guards opening and may read every session. `model` is what `/v1/models` calls the policy. Bodies above `max_body`
    bytes are refused.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        settings: Callable[[Mapping[str, Any]], SessionSettings] | None = None,
        admin_token: str | None = None,
        model: str = "policy",
        max_body: int = 64 << 20,
    ) -> None:
        self.store = store
        self._settings = settings
        self._admin_token = admin_token
        self._model = model
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point. Websockets are refused, lifespan is the server's."""
        if scope["type"] != "http":
            assert scope["type"] == "websocket", "served with lifespan off"
            await send({"type": "websocket.close", "code": 1003})
            return
        request = Request(scope, receive)
        head, tail = _split(scope["path"])
        dialect = _TURNS.get(tail, _ANTHROPIC if tail.startswith("v1/messages") else _CHAT)
        try:
            response = await self._answer(request, head, tail, dialect, send)
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            found = http_error(error)
            if found is None or _cancelled():
                raise
            response = _json(dialect.error(found.status, str(found), found.code), found.status)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(
        self, request: Request, session_id: str | None, tail: str, dialect: Dialect, send: Send
    ) -> Response | None:
        """The response; None when it has been sent."""
        method = request.method
        if tail == "health" and method == "GET":
            return _json({"status": "ok", "sessions": len(self.store)})
        if session_id is None and tail == "openapi.json" and method == "GET":
            return _json(openapi_document(__version__, opens=self._settings is not None))
        if session_id == "" and not tail:
            return await self._open(request)
        if session_id is None:
            session_id = request.headers.get("x-session-id")
            if session_id is None:
                raise HttpError(404, f"no path {request.url.path!r} without a session", "not_found")
        session = self.store.get(session_id)
        if session is None:
            raise HttpError(*_GONE)
        match (method, tail):
            case ("POST", path) if path in _TURNS:
                self._authorize(request, session)
                return await self._turn(request, session, dialect, send)
            case ("POST", "v1/messages/count_tokens"):
                self._authorize(request, session)
                turn = _ANTHROPIC.read_prompt(await self._body(request))
                return _json({"input_tokens": await session.count(turn)})
            case ("GET", "v1/models"):
                self._authorize(request, session)
                return _json(_models(self._model))
            case ("GET", ""):
                self._authorize(request, session, admin=True)
                return _json(_state(session))
            case ("DELETE", ""):
                self._authorize(request, session, admin=True)
                self.store.end(session.id)
                return _json({"id": session.id, "deleted": True})
            case ("POST", "export"):
                self._authorize(request, session, admin=True)
                return await self._export(request, session)
        raise HttpError(404, f"no {method} {request.url.path}", "not_found")

    # Requests.

    def _authorize(self, request: Request, session: Session | None, *, admin: bool = False) -> None:
        """401 without a token that somebody has, 403 with another session's."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if session is not None and session.owns(token):
            return
        if admin and self._admin_token and hmac.compare_digest(token.encode(), self._admin_token.encode()):
            return
        if token and self.store.owner(token) is not None:
            raise HttpError(403, "this token belongs to another session", "forbidden")
        what = "this session's token" if session is not None else "the server's admin token"
        raise HttpError(401, f"{what} is needed, in Authorization: Bearer or x-api-key", "unauthorized")

    async def _body(self, request: Request) -> dict[str, Any]:
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body:
            raise HttpError(413, f"the body has more than {self._max_body} bytes", "request_too_large")
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > self._max_body:
                raise HttpError(413, f"the body has more than {self._max_body} bytes", "request_too_large")
            pieces.append(piece)
        try:
            return expect(orjson.loads(b"".join(pieces) or b"{}"), dict, "the body")
        except orjson.JSONDecodeError as error:
            raise BadRequestError(f"the body is not JSON: {error}") from error

    async def _open(self, request: Request) -> Response:
        if request.method != "POST" or self._settings is None:
            raise HttpError(404, "this server opens no sessions over HTTP", "not_found")
        if self._admin_token is not None:
            self._authorize(request, None, admin=True)
        session = self.store.open(self._settings(await self._body(request)))
        base = str(request.base_url).rstrip("/")
        return _json(
            {"id": session.id, "token": session.token, "base_url": f"{base}/sessions/{session.id}"}, status=201
        )

    async def _export(self, request: Request, session: Session) -> Response:
        body = await self._body(request)
        chosen = get(body, "leaves", str, "drop_retries")
        if chosen not in PICKERS:
            raise BadRequestError(f"leaves: {chosen!r}; allowed: {', '.join(PICKERS)}")
        episode = get(body, "episode_id", str, session.id)
        identity = Identity(
            prompt_id=get(body, "prompt_id", str, ""),
            group_id=get(body, "group_id", str, episode),
            episode_id=episode,
        )
        limit = get(body, "max_tokens", int, session.settings.max_tokens)
        trajectories = export(session.tree, identity, max_tokens=max(0, limit), picker=PICKERS[chosen])
        data = await asyncio.to_thread(to_ipc, trajectories)
        return Response(data, media_type="application/vnd.apache.arrow.stream")

    # Turns.

    async def _turn(self, request: Request, session: Session, dialect: Dialect, send: Send) -> Response | None:
        turn = dialect.read(await self._body(request))
        gone = asyncio.create_task(_disconnected(request))
        try:
            if turn.stream:
                await self._streamed(session, dialect, turn, gone, send)
                return None
            reply = await _finished(session.start(turn), gone)
            return _json(dialect.answer(turn, reply))
        finally:
            gone.cancel()

    async def _streamed(
        self, session: Session, dialect: Dialect, turn: TurnRequest, gone: asyncio.Task[None], send: Send
    ) -> None:
        """Answer with server-sent events. The status waits for the first of them, so an early error keeps its own."""
        changed = asyncio.Event()
        codec, stops = self.store.codec, (*session.settings.sampling.stop, *turn.stop)
        progress = Progress(codec.family, codec.tokenizer, stops, changed.set)
        task = session.start(turn, progress)
        task.add_done_callback(lambda _: changed.set())
        gone.add_done_callback(_cancelling(task))
        writer, begun = dialect.stream(turn), False

        def head() -> bytes:
            """What comes before the first event; events are numbered in the order in which they are made."""
            return b"" if begun else writer.start()

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            while True:
                await changed.wait()
                changed.clear()
                if task.done():
                    break
                new = progress.take()
                if any(new):
                    await write(head() + writer.delta(*new))
            reply = task.result()
            rest = progress.take()
            delta = head() + (writer.delta(*rest) if any(rest) else b"")
            await write(delta + writer.finish(reply), more=False)
        except (Exception, asyncio.CancelledError) as error:
            if gone.done():
                raise ClientDisconnect from error
            found = http_error(error)
            if not begun or found is None or _cancelled():
                raise
            await write(writer.error(found.status, str(found), found.code), more=False)
        finally:
            task.cancel()
            del task  # its exception holds this frame, which would hold it: a cycle around the whole session


_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def _finished(task: asyncio.Task[Reply], gone: asyncio.Task[None]) -> Reply:
    """The reply; a client that goes away, or a server that stops, cancels the turn."""
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        del task  # as above


def _cancelling(task: asyncio.Task[Reply]) -> Callable[[object], None]:
    """A callback that cancels a turn. It is made here, so that no frame which is waiting for the turn holds it."""

    def cancel(_: object) -> None:
        task.cancel()

    return cancel


def _cancelled() -> bool:
    """Whether this request itself is cancelled (the server stops), not only its turn."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _split(path: str) -> tuple[str | None, str]:
    """(session id, what is behind it): None for a path without a session, "" for `/sessions` itself."""
    parts = path.strip("/").split("/", 2)
    if parts[0] != "sessions":
        return None, path.strip("/")
    return (parts[1] if len(parts) > 1 else ""), (parts[2] if len(parts) > 2 else "")


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def _models(name: str) -> dict[str, Any]:
    """A list that OpenAI and Anthropic clients both read."""
    model = {
        "id": name,
        "object": "model",
        "type": "model",
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "display_name": name,
        "owned_by": "miles",
    }
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}


def _state(session: Session) -> dict[str, Any]:
    tree = session.tree
    return {
        "id": session.id,
        "mode": tree.mode,
        "turns": tree.nodes,
        "tokens": tree.tokens,
        "leaves": len(tree.leaves()),
        "running": session.running,
        "full": session.full,
        "prompt_tokens": session.prompt_tokens,
        "cached_tokens": session.cached_tokens,
        "created": session.created,
    }
