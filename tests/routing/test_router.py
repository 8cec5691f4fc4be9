"""The router over stub engines: bytes, affinity, retries, engines that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson
import pytest

from miles_core.routing.router import RouterSettings
from miles_core.routing.serving import RouterServer
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

IDS = [1, 2, 3]


def stub(**options: Any) -> StubEngine:
    return StubEngine(hashed_script(100, 5), **options)


class Routed:
    """A router over stub engines, and a client of it."""

    def __init__(self, server: RouterServer, engines: Sequence[StubEngine], urls: Sequence[str]) -> None:
        self.server, self.engines, self.urls = server, engines, urls
        self.http: aiohttp.ClientSession

    async def generate(self, key: str = "", **fields: Any) -> tuple[int, Any]:
        headers = {"X-SMG-Routing-Key": key, **fields.pop("headers", {})}
        body = {"rid": "r", "input_ids": IDS, "sampling_params": {"max_new_tokens": 8}, **fields}
        async with self.http.post(f"{self.server.url}/generate", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def steer(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, f"{self.server.url}/router/{path}", **options) as response:
            return response.status, await response.json()

    def served(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines]


@contextlib.asynccontextmanager
async def routed(count: int = 4, **options: Any) -> AsyncIterator[Routed]:
    options = {"watch_interval": 0.05, "watch_deadline": 1.0, "settings": RouterSettings(deadline=5.0), **options}
    async with contextlib.AsyncExitStack() as stack:
        engines = [stub() for _ in range(count)]
        urls = [await stack.enter_async_context(stub_engine(engine)) for engine in engines]
        server = RouterServer(urls, **options)
        await server.start()
        stack.push_async_callback(server.close)
        made = Routed(server, engines, urls)
        made.http = await stack.enter_async_context(aiohttp.ClientSession())
        yield made


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.01)


async def test_sessions_stay_and_spread():
    async with routed() as made:
        for _ in range(5):
            answers = await asyncio.gather(*(made.generate(f"s{n}") for n in range(8)))
            assert {status for status, _ in answers} == {200}
        assert made.served() == [10, 10, 10, 10]
        places = [(await made.steer("GET", "sessions", params={"key": f"s{n}"}))[1] for n in range(8)]
        assert {p["moves"] for p in places} == {0}
        assert all(p["prompt_tokens"] == 5 * len(IDS) for p in places)


async def test_no_field_of_a_request_and_no_byte_of_an_answer_is_changed():
    seen: list[dict[str, Any]] = []
    async with routed(1) as made:
        sent = {"rid": "r", "input_ids": IDS, "sampling_params": {"max_new_tokens": 3}, "x-unknown": [1.50, None, "é"]}
        raw = orjson.dumps(sent)
        async with made.http.post(f"{made.urls[0]}/generate", data=raw) as response:
            direct = await response.read()
        headers = {"X-Anything": "kept", "Content-Type": "application/json"}
        url = f"{made.server.url}/generate?a=b%20c"
        async with made.http.post(url, data=raw, headers=headers) as response:
            through = await response.read()
        assert through == direct
        seen = made.engines[0].requests
        assert seen[0] == seen[1] == sent


async def test_streams_come_as_they_are_made():
    async with routed(1) as made:
        made.engines[0].stream_interval, made.engines[0].stream_latency = 1, 0.1
        body = {"rid": "r", "input_ids": IDS, "sampling_params": {"max_new_tokens": 5}, "stream": True}
        times = []
        async with made.http.post(f"{made.server.url}/generate", json=body) as response:
            async for _ in response.content.iter_any():
                times.append(asyncio.get_running_loop().time())
        assert len(times) >= 5
        assert times[-1] - times[0] > 0.25  # not all at the end


async def test_a_broken_connection_and_a_503_are_asked_elsewhere_and_nothing_else_is():
    async with routed(2) as made:
        made.engines[0].refuse_with = 503
        assert (await made.generate("s"))[0] == 200
        assert made.served() == [1, 1]
        made.engines[0].refuse_with = None
        made.engines[0].gone = True
        assert (await made.generate("t"))[0] == 200
        made.engines[0].gone = False
        made.engines[1].refuse_with = 400
        status, body = await made.generate("s")  # it moved to the second engine, and stays
        assert (status, body["error"]["message"]) == (400, "refused by the test")
        made.engines[1].refuse_with = 500
        assert (await made.generate("s"))[0] == 500
        assert made.server.router.retries == 2


async def test_an_engine_that_goes_silent_in_an_answer_breaks_it_and_never_shortens_it():
    async with routed(1) as made:
        made.engines[0].stream_interval, made.engines[0].stream_latency = 1, 30.0
        body = {"rid": "r", "input_ids": IDS, "sampling_params": {"max_new_tokens": 5}, "stream": True}
        async with made.http.post(f"{made.server.url}/generate", json=body) as response:
            await response.content.readany()
            await made.server.router.drain(made.urls[0], "test")
            with pytest.raises(aiohttp.ClientError):
                await response.read()


async def test_a_request_that_hangs_on_a_drained_engine_is_answered_by_another():
    async with routed(2) as made:
        made.engines[0].hang = True
        waiting = asyncio.create_task(made.generate("s"))
        await until(lambda: made.served()[0] == 1)
        await made.server.router.drain(made.urls[0], "test")
        assert (await waiting)[0] == 200
        assert (await made.steer("GET", "sessions?key=s"))[1]["moves"] == 1


async def test_deadlines():
    async with routed(1) as made:
        made.engines[0].hang = True
        begin = asyncio.get_running_loop().time()
        status, body = await made.generate(headers={"X-Request-Timeout": "0.3"})
        assert (status, body["error"]["code"]) == (504, "engine_unavailable")
        assert asyncio.get_running_loop().time() - begin < 2
        for wrong in ("soon", "0", "-1", "nan"):
            status, body = await made.generate(headers={"X-Request-Timeout": wrong})
            assert status == 400
            assert repr(wrong) in body["error"]["message"]


async def test_the_same_idempotency_key_twice_at_once_is_one_generation():
    async with routed(2) as made:
        for engine in made.engines:
            engine.latency = 0.3
        headers = {"Idempotency-Key": "k"}
        first = asyncio.create_task(made.generate(headers=headers))
        await until(lambda: sum(made.served()) == 1)
        assert (await made.generate(headers=headers))[0] == 409
        assert (await first)[0] == 200
        assert sum(made.served()) == 1
        assert (await made.generate(headers=headers))[0] == 200  # it has ended: a new one


async def test_engines_are_added_and_removed_while_it_runs():
    async with routed(2) as made, stub_engine(new := stub()) as url:
        assert (await made.generate("s"))[0] == 200
        status, state = await made.steer("POST", "engines", json={"url": url})
        assert (status, state["serving"]) == (201, True)
        assert (await made.steer("POST", "engines", json={"url": url}))[0] == 400
        assert (await made.steer("POST", "engines", json={"url": "ftp://x"}))[0] == 400
        for gone in made.urls:
            assert (await made.steer("DELETE", "engines", params={"url": gone}))[0] == 200
        assert (await made.steer("DELETE", "engines", params={"url": gone}))[0] == 404
        assert (await made.generate("s"))[0] == 200
        assert len(new.requests) == 1


async def test_a_stale_engine_gets_no_traffic_until_it_is_current():
    async with routed(2) as made:
        made.engines[1].version = 3
        await until(lambda: made.urls[0] in made.server.table.drained)
        assert "version 0, the current one is 3" in made.server.table.drained[made.urls[0]]
        for n in range(6):
            await made.generate(f"s{n}")
        assert made.served() == [0, 6]
        made.engines[0].version = 3
        await until(lambda: not made.server.table.drained)
        status, body = await made.steer("PUT", "version", json={"weight_version": 4})
        assert (status, body) == (200, {"weight_version": "4"})
        assert set(made.server.table.drained) == set(made.urls)
        status, body = await made.generate(headers={"X-Request-Timeout": "0.1"})
        assert status == 503


async def test_an_engine_that_answers_no_more_is_drained_and_comes_back():
    async with routed(2) as made:
        made.engines[0].gone = True
        await until(lambda: "does not answer" in made.server.table.drained.get(made.urls[0], ""))
        made.engines[0].gone = False
        await until(lambda: not made.server.table.drained)


async def test_what_changes_engines_goes_through_no_router():
    async with routed(1) as made:
        for path in ("pause_generation", "update_weights_from_disk", "flush_cache"):
            async with made.http.post(f"{made.server.url}/{path}", json={}) as response:
                assert response.status == 404
        async with made.http.post(f"{made.server.url}/abort_request", json={"rid": "r"}) as response:
            assert await response.json() == {"success": True, "engines": {made.urls[0]: 200}}
        async with made.http.get(f"{made.server.url}/server_info") as response:
            assert (await response.json())["version"] == "stub"
        async with made.http.get(f"{made.server.url}/health") as response:
            assert await response.json() == {"status": "ok", "engines": 1}
        assert made.engines[0].aborted == {"r"}


async def test_steering_needs_the_token():
    async with routed(1, admin_token="secret") as made:
        assert (await made.steer("GET", "engines"))[0] == 401
        assert (await made.steer("GET", "engines", headers={"Authorization": "Bearer wrong"}))[0] == 401
        status, body = await made.steer("GET", "engines", headers={"Authorization": "Bearer secret"})
        assert (status, body["engines"][0]["serving"]) == (200, True)


async def test_the_rank_of_a_session_is_in_its_requests():
    async with routed(1) as made:
        await until(lambda: not made.server.table.drained)
        made.engines[0].data_parallel = 2
        await until(lambda: made.server.table.engine(made.urls[0]).ranks == 2)
        for key in "sts":
            made.server.table.choose(key)
            made.server.table.started(made.server.table.pin(key).route, 100)  # load that never ends
        for key in "st":
            await made.generate(key)
        assert [request["routed_dp_rank"] for request in made.engines[0].requests] == [0, 1]
        await made.generate("s", routed_dp_rank=1)  # the client's own stays
        assert made.engines[0].requests[-1]["routed_dp_rank"] == 1


async def speak(url: str, data: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 505),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 400),
    ],
)
async def test_what_is_no_request_is_refused_and_ends_the_connection(data: bytes, status: int):
    async with routed(1, settings=RouterSettings(max_body=1000)) as made:
        answer = await speak(made.server.url, data)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert (await made.generate())[0] == 200


async def test_pipelined_requests_are_answered_in_order():
    async with routed(1) as made:
        one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        last = b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await speak(made.server.url, one + one + last)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.rindex(b"HTTP/1.1 404") > answer.rindex(b"HTTP/1.1 200")


async def test_a_client_that_leaves_stops_the_engines_work():
    async with routed(1) as made:
        made.engines[0].hang = True
        waiting = asyncio.create_task(made.generate())
        await until(lambda: made.served() == [1])
        waiting.cancel()
        await until(lambda: sum(made.server.table.engine(made.urls[0]).requests) == 0)
        assert made.server.table.engine(made.urls[0]).failed == 0
