"""The engine client's exchange: any chunks make the same answers, and a connection that had ended is no failure."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.engines import Sampling
from miles_core.engines.client import EngineConnection
from miles_core.errors import EngineError
from miles_core.http import JsonHttp, Retryable
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

SAMPLING = Sampling(max_new_tokens=8)


def generation(request_id: str, ids: list[int]) -> bytes:
    meta = {
        "id": request_id,
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 2,
        "weight_version": "0",
        "output_token_logprobs": [[-1.0, i, None] for i in ids],
    }
    return orjson.dumps({"output_ids": ids, "meta_info": meta})


class Scripted:
    """Serves one answer body in the chunks that a test cuts it into, then goes on or hangs up."""

    def __init__(self, pieces: Any, *, status: str = "200 OK", hang_up: bool = False) -> None:
        self.pieces, self.status, self.hang_up = pieces, status, hang_up
        self.requests = 0
        self.connections = 0
        self.open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self.serve(reader, writer))
        self.open.add(task)
        task.add_done_callback(self.open.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
                )
                asked = orjson.loads(await reader.readexactly(length))
                self.requests += 1
                writer.write(f"HTTP/1.1 {self.status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
                for piece in self.pieces(asked["rid"]):
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                if self.hang_up:
                    return


async def ask(scripted: Scripted, times: int = 1) -> list[Any]:
    server = await asyncio.start_server(scripted.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    http = JsonHttp(deadline=5.0)
    connection = EngineConnection(f"http://{host}:{port}", http)
    try:
        async with asyncio.timeout(20):
            return [await connection.generate([5, 6], SAMPLING) for _ in range(times)]
    finally:
        await connection.close()
        await http.close()
        server.close()
        if scripted.open:
            await asyncio.wait(scripted.open)


@given(st.lists(st.integers(1, 60), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_any_chunks_make_the_same_answer(cuts: list[int], line_end: bytes) -> None:
    def pieces(request_id: str) -> list[bytes]:
        body = b"data: " + generation(request_id, [7, 8, 9]) + 2 * line_end + b"data: [DONE]" + 2 * line_end
        found, rest = [], body
        for cut in cuts:
            found.append(rest[:cut])
            rest = rest[cut:]
        return [piece for piece in (*found, rest) if piece]

    (answer,) = asyncio.run(ask(Scripted(pieces)))
    assert answer.token_ids.tolist() == [7, 8, 9]


def whole(request_id: str) -> list[bytes]:
    return [b"data: " + generation(request_id, [7]) + b"\n\ndata: [DONE]\n\n"]


async def test_a_connection_is_kept_and_one_that_had_ended_is_replaced_unseen() -> None:
    kept = Scripted(whole)
    assert len(await ask(kept, times=3)) == 3
    assert (kept.connections, kept.requests) == (1, 3)
    closing = Scripted(whole, hang_up=True)
    assert len(await ask(closing, times=3)) == 3
    assert (closing.connections, closing.requests) == (3, 3)


async def test_an_answer_to_nobody_and_one_that_ends_early_are_errors() -> None:
    def stranger(request_id: str) -> list[bytes]:
        return [b"data: [1, 2]\n\n"]

    with pytest.raises(EngineError, match="not a generation"):
        await ask(Scripted(stranger))
    with pytest.raises(EngineError, match="the stream ended before the answer was finished"):
        await ask(Scripted(lambda _: [b"data: [DONE]\n\n"]))


async def test_a_503_says_that_it_may_be_asked_again() -> None:
    with pytest.raises(Retryable, match="503: busy"):
        await ask(Scripted(lambda _: [b"busy"], status="503 Service Unavailable"))


async def test_a_closed_connection_asks_nothing() -> None:
    async with stub_engine(StubEngine(hashed_script(50, 4))) as url:
        http = JsonHttp(deadline=5.0)
        connection = EngineConnection(url, http)
        await connection.close()
        with pytest.raises(EngineError, match="closed"):
            await connection.generate([5, 6], SAMPLING)
        await http.close()
