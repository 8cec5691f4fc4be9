"""A small dense model with tied embeddings on the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from miles_core.contracts.engines import PauseMode, Sampling
from miles_core.errors import EngineRefusal, PublishError
from tests.sglang.conftest import Publishing, Servers, logprobs_of, perturbed, publishing

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def servers(serve: Callable[..., Servers], dense_directory: Path) -> Servers:
    return serve(dense_directory)


async def test_logprobs_after_a_publish_are_those_of_transformers(servers: Servers, dense_directory: Path) -> None:
    async with publishing(servers) as ends:
        for version in (1, 2):
            model = perturbed(dense_directory, version)
            done = await ends.publish(version, model)
            assert (done.version, done.engines, done.drained) == (version, 1, ())
            found = await ends.pool.generate(PROMPT, Sampling(max_new_tokens=32, ignore_eos=True))
            assert found.versions.tolist() == [version] * 32
            ids = [*PROMPT, *found.token_ids.tolist()]
            np.testing.assert_allclose(found.logprobs, logprobs_of(model, ids, len(PROMPT)), atol=1e-5)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_a_publish_with_requests_in_flight(servers: Servers, dense_directory: Path, mode: PauseMode) -> None:
    old, new = perturbed(dense_directory, 11), perturbed(dense_directory, 12)
    async with publishing(servers) as ends:
        await ends.publish(11, old)
        flowing = asyncio.Event()
        prompts = [[*PROMPT, index] for index in range(12, 16)]
        requests = [
            asyncio.ensure_future(
                ends.pool.generate(
                    prompt, Sampling(max_new_tokens=400, ignore_eos=True), on_tokens=lambda _: flowing.set()
                )
            )
            for prompt in prompts
        ]
        await flowing.wait()
        await ends.publish(12, new, mode=mode)
        for prompt, request in zip(prompts, requests, strict=True):
            found = await request
            if mode == "abort":
                assert found.finish_reason == "abort"
                assert 0 < len(found.token_ids) < 400
                assert set(found.versions.tolist()) == {11}
                continue
            assert len(found.token_ids) == 400
            assert sorted(set(found.versions.tolist())) == [11, 12], "the version spans this request"
            assert (np.diff(found.versions) >= 0).all()
            ids = [*prompt, *found.token_ids.tolist()]
            before = found.versions == 11
            expected = logprobs_of(old, ids, len(prompt))
            np.testing.assert_allclose(found.logprobs[before], expected[before], atol=1e-5)
            if mode == "retract":  # keys and values are computed anew; in place they are a mixture by design
                expected = logprobs_of(new, ids, len(prompt))
                np.testing.assert_allclose(found.logprobs[~before], expected[~before], atol=1e-5)
        await _nothing_stale_is_cached(ends, prompts[0], new)


async def _nothing_stale_is_cached(ends: Publishing, prompt: list[int], model: object) -> None:
    found = await ends.pool.generate(prompt, Sampling(max_new_tokens=8, ignore_eos=True))
    assert set(found.versions.tolist()) == {12}
    ids = [*prompt, *found.token_ids.tolist()]
    np.testing.assert_allclose(found.logprobs, logprobs_of(model, ids, len(prompt)), atol=1e-5)


async def test_an_abort_gives_partial_tokens(servers: Servers, dense_directory: Path) -> None:
    async with publishing(servers) as ends:
        await ends.publish(21, perturbed(dense_directory, 21))
        flowing = asyncio.Event()
        request = asyncio.ensure_future(
            ends.pool.generate(PROMPT, Sampling(max_new_tokens=800, ignore_eos=True), on_tokens=lambda _: flowing.set())
        )
        await flowing.wait()
        await ends.pool.interrupt()
        found = await request
        assert found.finish_reason == "abort"
        assert 0 < len(found.token_ids) < 800
        assert len(found.logprobs) == len(found.versions) == len(found.token_ids)


async def test_an_id_outside_the_vocabulary_never_reaches_the_server(servers: Servers, dense_directory: Path) -> None:
    async with publishing(servers) as ends:
        await ends.publish(31, perturbed(dense_directory, 31))
        with pytest.raises(EngineRefusal, match=r"input_ids\[1\] is 320, outside the vocabulary"):
            await ends.pool.generate([5, 320], Sampling(max_new_tokens=1))
        found = await ends.pool.generate(PROMPT, Sampling(max_new_tokens=2, ignore_eos=True))
        assert len(found.token_ids) == 2


async def test_another_model_is_refused_before_the_pause(servers: Servers, dense_directory: Path) -> None:
    model = perturbed(dense_directory, 41)
    async with publishing(servers) as ends:
        await ends.publish(41, model)
    other = perturbed(dense_directory, 42)
    del other.model.layers[1]
    async with publishing(servers) as ends:
        with pytest.raises(PublishError, match=r"only the engine has model\.layers\.[1-9]"):
            await ends.publish(42, other)
        ends.pool.admit(ends.urls[0], 41)
        found = await ends.pool.generate(PROMPT, Sampling(max_new_tokens=4, ignore_eos=True))
        assert set(found.versions.tolist()) == {41}
        ids = [*PROMPT, *found.token_ids.tolist()]
        np.testing.assert_allclose(found.logprobs, logprobs_of(model, ids, len(PROMPT)), atol=1e-5)


async def test_a_restarted_server_serves_nothing_before_it_is_synced(servers: Servers, dense_directory: Path) -> None:
    model = perturbed(dense_directory, 51)
    async with publishing(servers) as ends:
        await ends.publish(51, model)
        process = servers.engine._launched.servers[0].process
        import os
        import signal

        os.killpg(int(str(process.ready["pid"])), signal.SIGKILL)

        async def restarted() -> str:
            return await anext(servers.engine.restarts())

        url = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(restarted(), servers.background.loop))
        assert url == ends.urls[0]
        request = asyncio.ensure_future(ends.pool.generate(PROMPT, Sampling(max_new_tokens=4, ignore_eos=True)))
        await asyncio.sleep(2.0)
        assert not request.done(), "a server that was started again has answered with the weights of its model"
        assert ends.pool.drained.keys() == {url}
        await ends.publish(52, model)
        found = await request
        assert set(found.versions.tolist()) == {52}
        ids = [*PROMPT, *found.token_ids.tolist()]
        np.testing.assert_allclose(found.logprobs, logprobs_of(model, ids, len(PROMPT)), atol=1e-5)
