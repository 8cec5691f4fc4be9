"""The adapter that a run exports, loaded by the real server."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.sglang.conftest import Servers, logprobs_of

pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks it

PROMPT = [5, 6, 7, 8, 9, 10, 11]
RANK = 8


@pytest.fixture(scope="module")
def adapted(dense_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model as transformers and peft see it with an adapter that changes what it says, and the adapter's export."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from miles_core.training.lora import add_adapters, save_adapter
    from miles_core.training.settings import LoraConfig

    config = LoraConfig(rank=RANK, alpha=2 * RANK)
    model = AutoModelForCausalLM.from_pretrained(dense_directory, dtype=torch.float32)
    add_adapters(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    out = tmp_path_factory.mktemp("adapter")
    save_adapter(model, config, out, base=str(dense_directory), write=True)
    plain = AutoModelForCausalLM.from_pretrained(dense_directory, dtype=torch.float32)
    return PeftModel.from_pretrained(copy.deepcopy(plain), out), out


@pytest.fixture(scope="module")
def servers(serve: Callable[..., Servers], dense_directory: Path, adapted: tuple[Any, Path]) -> Servers:
    return serve(
        dense_directory,
        *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-backend", "torch_native"),
        *("--lora-paths", f"mine={adapted[1]}"),
    )


async def generated(url: str, lora: str | None) -> tuple[list[int], list[float]]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "lora_path": lora,
    }
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    triples = answer["meta_info"]["output_token_logprobs"]
    return [t[1] for t in triples], [t[0] for t in triples]


async def test_the_exported_adapter_samples_what_peft_computes(servers: Servers, adapted: tuple[Any, Path]) -> None:
    model, _ = adapted
    ids, logprobs = await generated(servers.urls[0], "mine")
    expected = logprobs_of(model, [*PROMPT, *ids], len(PROMPT))
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    with model.disable_adapter():
        without = logprobs_of(model, [*PROMPT, *ids], len(PROMPT))
    assert np.abs(np.array(logprobs) - without).max() > 0.01  # the adapter was there
