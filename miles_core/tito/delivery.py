"""Bringing a turn's reply to its client, whole or as it is sampled; a client that goes away cancels the turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Send

from miles_core.tito.answers import http_error, json_answer
from miles_core.tito.dialects.base import Dialect
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec
from miles_core.tito.streaming import Progress
from miles_core.tito.turns import Reply, TurnRequest

__all__ = ["deliver", "is_cancelled"]

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def deliver(
    request: Request, session: Session, codec: Codec, dialect: Dialect, turn: TurnRequest, send: Send
) -> Response | None:
    """Run the turn; the response, None when it has been streamed. Raises `ClientDisconnect` when there is nobody to
    answer any more, and what the turn raises."""
    gone = asyncio.create_task(_disconnected(request))
    try:
        if turn.stream:
            await _streamed(session, codec, dialect, turn, gone, send)
            return None
        reply = await _finished(session.start(turn), gone)
        return json_answer(dialect.answer(turn, reply))
    finally:
        gone.cancel()


async def _streamed(
    session: Session, codec: Codec, dialect: Dialect, turn: TurnRequest, gone: asyncio.Task[None], send: Send
) -> None:
    """Answer with server-sent events. The status waits for the first of them, so an early error keeps its own."""
    changed = asyncio.Event()
    stops = (*session.settings.sampling.stop, *turn.stop)
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
        if not begun or found is None or is_cancelled():
            raise
        await write(writer.error(found.status, str(found), found.code), more=False)
    finally:
        task.cancel()
        del task  # its exception holds this frame, which would hold it: a cycle around the whole session


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


def is_cancelled() -> bool:
    """Whether this request itself is cancelled (the server stops), not only its turn."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
