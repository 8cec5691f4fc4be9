"""Bringing a turn's reply to its client, whole or as it is sampled; a client that goes away cancels the turn."""

from __future__ import annotations

from miles_core.routing.client_side import ClientConnection
from miles_core.tito.answers import http_error
from miles_core.tito.bodies import Body, read_json
from miles_core.tito.dialects.base import Dialect
from miles_core.tito.history import History
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec
from miles_core.tito.streaming import Progress
from miles_core.tito.turns import TurnRequest

__all__ = ["deliver", "read_turn"]

_EVENTS = b"text/event-stream; charset=utf-8"


def read_turn(dialect: Dialect, data: bytes, session: Session) -> TurnRequest:
    """The turn that a request's body asks for. Raises `BadRequestError`."""
    if not dialect.late:
        return dialect.read(read_json(data))
    body = Body(data, session.written)
    turn = dialect.read(body.fields)
    assert isinstance(turn.messages, History)
    turn.messages.body = body
    return turn


async def deliver(
    client: ClientConnection, session: Session, codec: Codec, dialect: Dialect, turn: TurnRequest
) -> None:
    """Run the turn and answer it. Raises what the turn raises before anything was answered."""
    if turn.stream:
        await _streamed(client, session, codec, dialect, turn)
    else:
        client.answer(200, dialect.answer(turn, await session.answer(turn)))


async def _streamed(
    client: ClientConnection, session: Session, codec: Codec, dialect: Dialect, turn: TurnRequest
) -> None:
    """Answer with server-sent events. The status waits for the first of them, so an early error keeps its own."""
    writer = dialect.stream(turn)

    def start() -> bytes:
        """What comes before the first event; events are numbered in the order in which they are made."""
        if client.status:
            return b""
        client.begin(_EVENTS)
        return writer.start()

    def more(progress: Progress) -> None:
        if client.paused:
            return  # what it does not take now comes with what follows
        new = progress.take()
        if any(new):
            client.piece(start() + writer.delta(*new))

    progress = Progress(codec.family, codec.tokenizer, (*session.settings.sampling.stop, *turn.stop), more)
    try:
        reply = await session.answer(turn, progress)
        rest = progress.take()
        events = start() + (writer.delta(*rest) if any(rest) else b"")
        client.piece(events + writer.finish(reply))
    except Exception as error:
        found = http_error(error)
        if not client.status or found is None:
            raise
        client.piece(writer.error(found.status, str(found), found.code))
    client.end()
