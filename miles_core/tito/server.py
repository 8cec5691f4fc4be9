"""The session server's HTTP side: three dialects, one session a path.

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

from miles_core import __version__
from miles_core.routing.client_side import ClientConnection
from miles_core.routing.wire import Request
from miles_core.tito.answers import HttpError, gone, http_error, models, state
from miles_core.tito.bodies import read_json
from miles_core.tito.delivery import deliver, read_turn
from miles_core.tito.dialects.anthropic import AnthropicDialect
from miles_core.tito.dialects.base import Dialect, get
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

_ARROW = b"application/vnd.apache.arrow.stream"


class SessionApp:
    """What the session server serves (an `Application`), over a `SessionStore`.

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
        self.max_body = max_body
        self._settings = settings
        self._admin_token = admin_token
        self._model = model

    async def __call__(self, request: Request, client: ClientConnection) -> None:
        """See `Application`."""
        session_id, tail = _split(request.path)
        try:
            await self._answer(request, session_id, tail, client)
        except Exception as error:
            found = http_error(error)
            if found is None or client.status:
                raise
            client.answer(found.status, _dialect(tail).error(found.status, str(found), found.code))

    def refusal(self, request: Request, status: int, message: str, code: str) -> object:
        """See `Application`."""
        return _dialect(_split(request.path)[1]).error(status, message, code)

    async def _answer(self, request: Request, session_id: str | None, tail: str, client: ClientConnection) -> None:
        method = request.method.decode()
        if tail == "health" and method == "GET":
            client.answer(200, {"status": "ok", "sessions": len(self.store)})
            return
        if session_id is None and tail == "openapi.json" and method == "GET":
            client.answer(200, openapi_document(__version__, opens=self._settings is not None))
            return
        if session_id == "" and not tail:
            client.answer(201, self._open(request))
            return
        if session_id is None:
            session_id = request.header(b"x-session-id")
            if not session_id:
                raise HttpError(404, f"no path {request.path!r} without a session", "not_found")
        session = self.store.get(session_id)
        if session is None:
            raise gone()
        match (method, tail):
            case ("POST", path) if path in TURNS:
                self._authorize(request, session)
                dialect = TURNS[path]
                await deliver(client, session, self.store.codec, dialect, read_turn(dialect, request.body, session))
            case ("POST", "v1/messages/count_tokens"):
                self._authorize(request, session)
                turn = _ANTHROPIC.read_prompt(read_json(request.body))
                client.answer(200, {"input_tokens": await session.count(turn)})
            case ("GET", "v1/models"):
                self._authorize(request, session)
                client.answer(200, models(self._model))
            case ("GET", ""):
                self._authorize(request, session, admin=True)
                client.answer(200, state(session))
            case ("DELETE", ""):
                self._authorize(request, session, admin=True)
                self.store.end(session.id)
                client.answer(200, {"id": session.id, "deleted": True})
            case ("POST", "export"):
                self._authorize(request, session, admin=True)
                client.answer(200, await self._export(request, session), content_type=_ARROW)
            case _:
                raise HttpError(404, f"no {method} {request.path}", "not_found")

    # Requests.

    def _authorize(self, request: Request, session: Session | None, *, admin: bool = False) -> None:
        """401 without a token that somebody has, 403 with another session's."""
        scheme, _, given = request.header(b"authorization").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else request.header(b"x-api-key")
        if session is not None and session.owns(token):
            return
        if admin and self._admin_token and hmac.compare_digest(token.encode(), self._admin_token.encode()):
            return
        if token and self.store.owner(token) is not None:
            raise HttpError(403, "this token belongs to another session", "forbidden")
        what = "this session's token" if session is not None else "the server's admin token"
        raise HttpError(401, f"{what} is needed, in Authorization: Bearer or x-api-key", "unauthorized")

    def _open(self, request: Request) -> Mapping[str, Any]:
        if request.method != b"POST" or self._settings is None:
            raise HttpError(404, "this server opens no sessions over HTTP", "not_found")
        if self._admin_token is not None:
            self._authorize(request, None, admin=True)
        session = self.store.open(self._settings(read_json(request.body)))
        scheme = request.header(b"x-forwarded-proto") or "http"
        base = f"{scheme}://{request.header(b'host')}/sessions/{session.id}"
        return {"id": session.id, "token": session.token, "base_url": base}

    async def _export(self, request: Request, session: Session) -> bytes:
        body = read_json(request.body)
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
        return await asyncio.to_thread(to_ipc, trajectories)


def _dialect(tail: str) -> Dialect:
    """In whose words an error below this path is told."""
    return TURNS.get(tail, _ANTHROPIC if tail.startswith("v1/messages") else _CHAT)


def _split(path: str) -> tuple[str | None, str]:
    """(session id, what is behind it): None for a path without a session, "" for `/sessions` itself."""
    parts = path.strip("/").split("/", 2)
    if parts[0] != "sessions":
        return None, path.strip("/")
    return (parts[1] if len(parts) > 1 else ""), (parts[2] if len(parts) > 2 else "")
