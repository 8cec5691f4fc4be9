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
from miles_core.tito.answers import GONE, HttpError, http_error, json_answer, models, state
from miles_core.tito.delivery import deliver, is_cancelled
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
from miles_core.tito.turns import BadRequestError

__all__ = ["TURNS", "SessionApp"]

_CHAT, _RESPONSES, _ANTHROPIC = ChatDialect(), ResponsesDialect(), AnthropicDialect()
TURNS: dict[str, Dialect] = {
    "v1/chat/completions": _CHAT,
    "v1/responses": _RESPONSES,
    "v1/messages": _ANTHROPIC,
    "inference/v1/generate": TokenDialect(),
}
"""Paths below a session that ask for a turn, and how each speaks."""


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
        dialect = TURNS.get(tail, _ANTHROPIC if tail.startswith("v1/messages") else _CHAT)
        try:
            response = await self._answer(request, head, tail, dialect, send)
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            found = http_error(error)
            if found is None or is_cancelled():
                raise
            response = json_answer(dialect.error(found.status, str(found), found.code), found.status)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(
        self, request: Request, session_id: str | None, tail: str, dialect: Dialect, send: Send
    ) -> Response | None:
        """The response; None when it has been sent."""
        method = request.method
        if tail == "health" and method == "GET":
            return json_answer({"status": "ok", "sessions": len(self.store)})
        if session_id is None and tail == "openapi.json" and method == "GET":
            return json_answer(openapi_document(__version__, opens=self._settings is not None))
        if session_id == "" and not tail:
            return await self._open(request)
        if session_id is None:
            session_id = request.headers.get("x-session-id")
            if session_id is None:
                raise HttpError(404, f"no path {request.url.path!r} without a session", "not_found")
        session = self.store.get(session_id)
        if session is None:
            raise HttpError(*GONE)
        match (method, tail):
            case ("POST", path) if path in TURNS:
                self._authorize(request, session)
                turn = dialect.read(await self._body(request))
                return await deliver(request, session, self.store.codec, dialect, turn, send)
            case ("POST", "v1/messages/count_tokens"):
                self._authorize(request, session)
                turn = _ANTHROPIC.read_prompt(await self._body(request))
                return json_answer({"input_tokens": await session.count(turn)})
            case ("GET", "v1/models"):
                self._authorize(request, session)
                return json_answer(models(self._model))
            case ("GET", ""):
                self._authorize(request, session, admin=True)
                return json_answer(state(session))
            case ("DELETE", ""):
                self._authorize(request, session, admin=True)
                self.store.end(session.id)
                return json_answer({"id": session.id, "deleted": True})
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
        return json_answer(
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


def _split(path: str) -> tuple[str | None, str]:
    """(session id, what is behind it): None for a path without a session, "" for `/sessions` itself."""
    parts = path.strip("/").split("/", 2)
    if parts[0] != "sessions":
        return None, path.strip("/")
    return (parts[1] if len(parts) > 1 else ""), (parts[2] if len(parts) > 2 else "")
