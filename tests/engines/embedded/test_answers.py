"""The engine thread's answers on their way to the event loop: all of them, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from miles_core.engines.embedded.server import Answers


def test_nothing_is_lost_whatever_the_threads_do() -> None:
    async def go() -> list[int]:
        answers = Answers()
        items: list[Any] = list(range(2000))

        def put() -> None:
            for item in items:
                answers.put(item, {})

        thread = threading.Thread(target=put)
        thread.start()
        read: list[Any] = []
        while len(read) < len(items):
            some = await asyncio.wait_for(answers.get(), 10)
            assert some, "woken up for nothing"
            read += [sequence for sequence, _ in some]
        thread.join()
        return read

    assert asyncio.run(go()) == list(range(2000))


def test_what_a_step_came_to_wakes_the_loop_once() -> None:
    async def go() -> None:
        loop, woken = asyncio.get_running_loop(), []
        answers = Answers()
        answers._loop = cast(asyncio.AbstractEventLoop, SimpleNamespace(call_soon_threadsafe=woken.append))
        for item in range(64):
            answers.put(item, {})  # type: ignore[arg-type]
        (wake,) = woken
        loop.call_soon(wake)
        assert len(await answers.get()) == 64

    asyncio.run(go())
