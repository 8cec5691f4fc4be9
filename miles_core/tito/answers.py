"""What the session server answers that is no turn: errors, and JSON of its own."""

from __future__ import annotations

from typing import Any

from miles_core.errors import EngineError, EngineRefusal, EngineUnavailable
from miles_core.tito.sessions import Session, SessionEndedError
from miles_core.tito.tree import TurnConflictError, TurnRefusedError
from miles_core.tito.turns import BadRequestError

__all__ = ["HttpError", "gone", "http_error", "models", "state"]


class HttpError(Exception):
    """An answer that is an error: status, message, code."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def gone() -> HttpError:
    """The answer where there is no session."""
    return HttpError(404, "no session of this id: it has ended, expired or never was", "session_not_found")


def http_error(error: Exception) -> HttpError | None:
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
        case SessionEndedError():
            return gone()
    return None


def models(name: str) -> dict[str, Any]:
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


def state(session: Session) -> dict[str, Any]:
    """What `GET /sessions/ID` tells of a session."""
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
