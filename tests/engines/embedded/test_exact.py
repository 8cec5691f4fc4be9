"""The engine computes what transformers computes: the oracle is ``generate`` and a plain forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from .conftest import Harness, body, prompts

FAMILIES = ("llama", "qwen3", "mistral_window", "qwen3_moe")


@functools.cache
def load(directory: Path) -> Any:
    """Return the oracle: the same checkpoint in plain transformers, with end of sequence off."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model


def reference_tokens(directory: Path, ids: list[int], count: int) -> list[int]:
    model = load(directory)
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count, pad_token_id=2)
    return out[0, len(ids) :].tolist()


def reference_logprobs(directory: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return log-probs [T - 1, V] of what follows each position."""
    model = load(directory)
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


def check_logprobs(directory: Path, ids: list[int], answer: dict[str, Any], temperature: float = 1.0) -> None:
    output = answer["output_ids"]
    for field, at in (("output_token_logprobs", temperature), ("output_token_logprobs_original", 1.0)):
        expected = reference_logprobs(directory, ids + output, at)[len(ids) - 1 :]
        got = answer["meta_info"][field]
        assert [token for _, token, _ in got] == output
        for row, (logprob, token, _) in zip(expected, got, strict=True):
            assert logprob == pytest.approx(float(row[token]), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_generate_for_ragged_prompts_refilled_slots_and_cached_prefixes(
    family: str, start: Callable[..., Harness], model_directory: Callable[[str], Path]
) -> None:
    harness = start(family, "--max-running", "3", "--max-prefill-tokens", "16")
    some = prompts(6, shared=5)
    some += [some[0], some[1] + [7, 8], some[2][:4]]
    lengths = [3, 12, 1, 7, 5, 9, 12, 4, 6]
    bodies = [
        body(ids, temperature=0, max_new_tokens=count, ignore_eos=True)
        for ids, count in zip(some, lengths, strict=True)
    ]
    directory = model_directory(family)
    for _ in range(2):  # the second time everything is cached
        for ids, count, answer in zip(some, lengths, harness.together(*bodies), strict=True):
            assert answer["output_ids"] == reference_tokens(directory, ids, count)
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": count}
            check_logprobs(directory, ids, answer)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sampled_logprobs_are_at_the_sampling_temperature_whatever_truncates(
    family: str, start: Callable[..., Harness], model_directory: Callable[[str], Path]
) -> None:
    harness = start(family)
    some = prompts(4)
    cuts: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}]
    bodies = [
        body(ids, temperature=0.6, max_new_tokens=8, sampling_seed=3, ignore_eos=True, **cut)
        for ids, cut in zip(some, cuts, strict=True)
    ]
    for ids, answer in zip(some, harness.together(*bodies), strict=True):
        check_logprobs(model_directory(family), ids, answer, 0.6)


@pytest.mark.parametrize("start_len", [0, 1, 4])
@pytest.mark.parametrize("max_new", [0, 2])
def test_prompt_logprobs(
    start_len: int, max_new: int, start: Callable[..., Harness], model_directory: Callable[[str], Path]
) -> None:
    harness = start("qwen3", "--max-prefill-tokens", "4")
    (ids,) = prompts(1, shared=8)
    request = body(ids, temperature=0, max_new_tokens=max_new) | {
        "logprob_start_len": start_len,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 6],
    }
    harness.generate(body(ids, max_new_tokens=2))  # a cached prefix must not hide positions
    (answer,) = harness.generate(request)
    expected = reference_logprobs(model_directory("qwen3"), ids)
    meta = answer["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [token for _, token, _ in entries] == ids[start_len:]
    for position, (logprob, token, _) in enumerate(entries, start_len):
        if position == 0:
            assert logprob is None
            continue
        row = expected[position - 1]
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)
        top = meta["input_top_logprobs"][position - start_len]
        assert [token for _, token, _ in top] == row.topk(2).indices.tolist()
        chosen = meta["input_token_ids_logprobs"][position - start_len]
        assert [token for _, token, _ in chosen] == [5, 6]
        assert chosen[0][0] == pytest.approx(float(row[5]), abs=1e-5)
    assert len(answer["output_ids"]) <= max_new
    assert len(meta["output_top_logprobs"]) == len(answer["output_ids"])


def test_routed_experts_are_those_of_a_plain_forward_pass(
    start: Callable[..., Harness], model_directory: Callable[[str], Path]
) -> None:
    import base64

    import numpy as np

    harness = start("qwen3_moe", "--max-prefill-tokens", "8")
    (ids,) = prompts(1, shared=12)
    harness.generate(body(ids, max_new_tokens=2))  # computed without routes: must not be reused
    request = body(ids, temperature=0, max_new_tokens=4, ignore_eos=True) | {"return_routed_experts": True}
    for begin in (0, 3):
        (answer,) = harness.generate(request | {"routed_experts_start_len": begin})
        meta = answer["meta_info"]
        rows = len(ids) + 4 - 1 - begin
        assert meta["routed_experts_shape"] == [rows, 2, 2]
        routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(rows, 2, 2)
        expected = reference_routes(model_directory("qwen3_moe"), ids + answer["output_ids"])
        assert np.array_equal(routes, expected[begin:])
        assert meta["cached_tokens"] == (0 if begin == 0 else len(ids) - 1)
        if begin == 0:
            harness.call(harness.engine.flush_cache)
            harness.generate(request)  # computed with routes: may be reused


def reference_routes(directory: Path, ids: list[int]) -> Any:
    model = load(directory)
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    return torch.stack([layer.softmax(-1).topk(2).indices for layer in logits], 1).numpy()
