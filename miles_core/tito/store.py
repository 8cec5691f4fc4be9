"""The open sessions of one server."""

from __future__ import annotations

import time

from miles_core.tito.paths import RecentPaths
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.tree import TurnRefusedError

__all__ = ["SessionStore"]


class SessionStore:
    """The open sessions of one server."""

    def __init__(self, codec: Codec, *, max_sessions: int = 100_000) -> None:
        self.codec = codec
        self.max_sessions = max_sessions
        self._sessions: dict[str, Session] = {}
        self._paths = RecentPaths()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def running(self) -> int:
        """Turns under way in all of them."""
        return sum(session.running for session in self._sessions.values())

    def open(self, settings: SessionSettings) -> Session:
        """A new session. Raises `TurnRefusedError` when the server holds as many as it may."""
        if len(self._sessions) >= self.max_sessions:
            raise TurnRefusedError(f"the server holds {len(self._sessions)} sessions, its limit")
        session = Session(self.codec, settings, self._paths)
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def owner(self, token: str) -> Session | None:
        """The session that a token opens. Linear in the sessions; asked only to tell foreign tokens from wrong ones."""
        return next((s for s in self._sessions.values() if s.owns(token)), None)

    def end(self, session_id: str) -> None:
        """End a session and cancel its turns. Ending twice is fine."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.end()

    def expire(self) -> list[str]:
        """End the sessions that nobody has used for their time to live; those with a turn under way stay."""
        now = time.monotonic()
        old = [i for i, s in self._sessions.items() if not s.running and now - s.touched > s.settings.ttl]
        for session_id in old:
            self.end(session_id)
        return old

    def close(self) -> None:
        for session_id in list(self._sessions):
            self.end(session_id)
