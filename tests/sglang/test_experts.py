"""A small mixture of experts on the real server: routes as data, and one name an expert in a publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.contracts.engines import Generation, Sampling
from tests.sglang.conftest import Servers, logprobs_of, perturbed, publishing

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def servers(serve: Callable[..., Servers], moe_directory: Path) -> Servers:
    return serve(moe_directory, "--enable-return-routed-experts")


async def test_routes_are_those_of_transformers_at_every_position(servers: Servers, moe_directory: Path) -> None:
    model = perturbed(moe_directory, 1)
    async with publishing(servers) as ends:
        await ends.publish(1, model)
        first = await ends.pool.generate(PROMPT, Sampling(max_new_tokens=12, ignore_eos=True))
        _check(first, PROMPT, model)
        second_prompt = [*PROMPT, *first.token_ids.tolist(), 20, 21, 22]
        second = await ends.pool.generate(second_prompt, Sampling(max_new_tokens=12, ignore_eos=True))
        assert second.cached_tokens > 0, "the second turn starts from the first one's prefix"
        _check(second, second_prompt, model)


def _check(found: Generation, prompt: list[int], model: Any) -> None:
    ids = [*prompt, *found.token_ids.tolist()]
    np.testing.assert_allclose(found.logprobs, logprobs_of(model, ids, len(prompt)), atol=1e-5)
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    expected = np.stack([layer.topk(2, dim=-1).indices.sort(-1).values.numpy() for layer in logits], axis=1)
    assert found.routed_experts is not None
    assert found.routed_experts.shape == (len(ids) - 1, 2, 2)
    np.testing.assert_array_equal(np.sort(found.routed_experts, axis=-1), expected)
