"""What happens to requests when the engine is paused, flushed, updated, short of room, or when a step fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import xxhash

from miles_core.engines.embedded.engine import StepError
from miles_core.engines.embedded.protocol import BadRequestError
from miles_core.engines.embedded.weights import ChecksumError, WrongStateError

from .conftest import Harness, body, prompts


def publish(path: Path, weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Write a file as the shared-memory transport does; return its description."""
    entries, blob = [], b""
    for name, tensor in weights.items():
        blob += b"\0" * (-len(blob) % 64)
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        entries.append(
            {
                "name": name,
                "dtype": str(tensor.dtype)[6:],
                "shape": list(tensor.shape),
                "offset": len(blob),
                "nbytes": len(data),
                "checksum": xxhash.xxh3_128_hexdigest(data),
            }
        )
        blob += data
    path.write_bytes(blob)
    return entries


def checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def other_weights(directory: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in checkpoint(directory).items()}


def update(harness: Harness, path: Path, weights: dict[str, torch.Tensor], version: str) -> None:
    harness.engine.staged = harness.app._weights.stage(str(path), publish(path, weights), version)
    harness.call(lambda: harness.engine.commit(version))


def reference(
    directory: Path, weights: dict[str, torch.Tensor], tmp_path: Path, ids: list[int], count: int
) -> list[int]:
    """Return ``count`` greedy tokens of a model that transformers loaded from ``weights``."""
    from safetensors.torch import save_file

    transformers.AutoConfig.from_pretrained(directory).save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count, pad_token_id=2)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_committed_version_is_what_transformers_loads_from_the_same_checkpoint(
    family: str, start: Callable[..., Harness], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    harness, (ids,) = start(family), prompts(1, shared=9)
    request = body(ids, temperature=0, max_new_tokens=6, ignore_eos=True)
    (before,) = harness.generate(request)
    weights = other_weights(model_directory(family))
    harness.call(lambda: harness.engine.pause("retract"))
    update(harness, tmp_path / "v1", weights, "1")
    harness.call(harness.engine.resume)
    (after,) = harness.generate(request)
    assert after["meta_info"]["cached_tokens"] == 0  # field bug: prefixes of old weights
    assert after["meta_info"]["weight_version"] == "1"
    assert after["output_ids"] != before["output_ids"]
    assert after["output_ids"] == reference(model_directory(family), weights, tmp_path, ids, 6)
    assert harness.call(harness.engine.checksums) == {
        entry["name"]: entry["checksum"] for entry in publish(tmp_path / "again", weights)
    }


def test_tied_weights_stay_tied_and_may_be_sent_under_both_names(
    start: Callable[..., Harness], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    harness = start("llama")
    weights = other_weights(model_directory("llama"))
    assert "lm_head.weight" not in weights
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    harness.call(lambda: harness.engine.pause("retract"))
    update(harness, tmp_path / "v1", both, "1")
    model = harness.engine._runner.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    both["lm_head.weight"][0, 0] += 1
    with pytest.raises(BadRequestError, match="lm_head"):
        update(harness, tmp_path / "v2", both, "2")


def test_what_does_not_fit_is_refused_by_name_and_the_old_weights_go_on(
    start: Callable[..., Harness], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    harness = start("qwen3")
    weights = other_weights(model_directory("qwen3"))
    path = tmp_path / "v1"
    store, entries = harness.app._weights, publish(path, weights)
    name = "model.layers.1.mlp.up_proj.weight"
    index = next(i for i, entry in enumerate(entries) if entry["name"] == name)
    before = harness.call(harness.engine.checksums)

    def changed(**fields: Any) -> list[dict[str, Any]]:
        return [entry | fields if i == index else entry for i, entry in enumerate(entries)]

    for described, message in (
        (entries[:index] + entries[index + 1 :], f"missing 1: {name}"),
        ([*entries, entries[index] | {"name": "model.extra"}], r"unexpected 1: model\.extra"),
        ([*entries, entries[index]], "twice"),
        (changed(dtype="bfloat16"), f"{name}: dtype bfloat16"),
        (changed(shape=[1, 2]), rf"{name}: shape \[1, 2\]"),
        (changed(nbytes=4), f"{name}: 4 bytes"),
        (changed(offset=10**9), f"{name}: offset"),
        (changed(offset="a"), "offset"),
        ("nonsense", "list"),
    ):
        with pytest.raises(BadRequestError, match=message):
            store.stage(str(path), described, "1")
    with pytest.raises(BadRequestError, match="cannot map"):
        store.stage(str(tmp_path / "absent"), entries, "1")
    data = bytearray(path.read_bytes())
    data[entries[index]["offset"] + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=name):
        store.stage(str(path), entries, "1")
    with pytest.raises(WrongStateError, match="paused"):
        harness.call(lambda: harness.engine.commit("1"))
    harness.call(lambda: harness.engine.pause("retract"))
    with pytest.raises(WrongStateError, match="not staged"):
        harness.call(lambda: harness.engine.commit("1"))
    assert harness.call(harness.engine.checksums) == before
    assert harness.engine.version == "0"


def stop_after(harness: Harness, steps: int, mode: str) -> None:
    """Pause once the engine has taken so many more steps."""
    engine, runner = harness.engine, harness.engine._runner
    original, taken = runner.step, 0

    def step(plan: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == steps:
            runner.step = original
            engine.call(lambda: engine.pause(mode))  # runs right after this step
        return original(plan)

    runner.step = step


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_versions_are_recorded_per_token_across_a_pause(
    mode: str, start: Callable[..., Harness], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    harness, (ids,) = start("llama"), prompts(1, shared=6)
    request = body(ids, temperature=0, max_new_tokens=10, ignore_eos=True)
    (old,) = harness.generate(request)
    harness.call(harness.engine.flush_cache)
    stop_after(harness, 4, mode)
    collect = harness.submit(request)
    while harness.engine.pause_mode is None:
        pass
    weights = other_weights(model_directory("llama"))
    update(harness, tmp_path / "v1", weights, "1")
    harness.call(harness.engine.resume)
    (answer,) = collect()
    meta = answer["meta_info"]
    assert meta["weight_versions"] == [
        {"version": "0", "start": 0, "end": 4},
        {"version": "1", "start": 4, "end": 10},
    ]
    assert answer["output_ids"][:4] == old["output_ids"][:4]
    assert meta["output_token_logprobs"][:4] == old["meta_info"]["output_token_logprobs"][:4]
    assert meta["num_retractions"] == (mode == "retract")
    continued = reference(model_directory("llama"), weights, tmp_path, ids + answer["output_ids"][:4], 6)
    if mode == "retract":
        assert answer["output_ids"][4:] == continued
    (again,) = harness.generate(body(ids, temperature=0, max_new_tokens=1))
    cached = again["meta_info"]["cached_tokens"]
    assert cached == (len(ids) - 1 if mode == "retract" else 0)  # old-weight prefixes are never matched
    info = harness.call(harness.engine.stats)
    assert info["num_used_tokens"] == info["num_evictable_tokens"]


def test_pausing_with_abort_answers_with_partial_tokens(start: Callable[..., Harness]) -> None:
    harness = start("llama", "--max-running", "1")
    stop_after(harness, 3, "abort")
    first, waiting = harness.submit(*[body(ids, max_new_tokens=50, ignore_eos=True) for ids in prompts(2)])()
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(first["output_ids"]) == 3
    assert waiting["meta_info"]["finish_reason"]["type"] == "abort"
    assert waiting["output_ids"] == []  # field bug: empty after an abort before prefill


def test_an_abort_ends_the_named_request_and_no_other(start: Callable[..., Harness]) -> None:
    harness = start("llama")
    harness.call(lambda: harness.engine.pause("in_place"))
    one, two = prompts(2)
    collect = harness.submit(
        body(one, max_new_tokens=5, ignore_eos=True) | {"rid": "a"}, body(two, max_new_tokens=5, ignore_eos=True)
    )
    assert harness.call(lambda: harness.engine.abort("a")) == 1
    assert harness.call(lambda: harness.engine.abort("a")) == 0
    harness.call(harness.engine.resume)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in collect()] == ["abort", "length"]


def test_a_failed_step_answers_its_requests_and_the_engine_goes_on(start: Callable[..., Harness]) -> None:
    harness = start("llama", "--max-running", "1")
    runner, (one, two) = harness.engine._runner, prompts(2)
    original = runner.step

    def broken(_plan: Any) -> Any:
        runner.step = original
        raise RuntimeError("planted")

    runner.step = broken
    harness.call(lambda: harness.engine.pause("in_place"))
    first, second = (harness.submit(body(ids, max_new_tokens=3, ignore_eos=True)) for ids in (one, two))
    harness.call(harness.engine.resume)
    with pytest.raises(StepError, match="planted"):
        first()
    assert len(second()[0]["output_ids"]) == 3
    assert len(harness.generate(body(one, max_new_tokens=2, ignore_eos=True))[0]["output_ids"]) == 2


def test_short_of_room_sequences_are_retracted_and_lose_nothing(start: Callable[..., Harness]) -> None:
    some = prompts(4, low=20, high=24)
    bodies = [body(ids, max_new_tokens=70, ignore_eos=True, sampling_seed=index) for index, ids in enumerate(some)]
    roomy = start("qwen3").together(*bodies)
    tight = start("qwen3", "--max-total-tokens", "230").together(*bodies)
    assert sum(answer["meta_info"]["num_retractions"] for answer in tight) > 0
    assert [answer["output_ids"] for answer in tight] == [answer["output_ids"] for answer in roomy]


def test_a_session_pays_only_for_what_is_new(start: Callable[..., Harness]) -> None:
    harness, (ids,) = start("llama"), prompts(1, shared=10)
    for _ in range(3):
        (answer,) = harness.generate(body(ids, max_new_tokens=4, ignore_eos=True))
        history = ids + answer["output_ids"]
        ids = [*history, 9, 8, 7]
        (following,) = harness.generate(body(ids, max_new_tokens=1, ignore_eos=True))
        assert following["meta_info"]["cached_tokens"] == len(history) - 1  # the last token had no keys yet


def test_stop_ids_end_a_request_and_wait_for_min_new_tokens(start: Callable[..., Harness]) -> None:
    harness, (ids,) = start("llama"), prompts(1)
    (free,) = harness.generate(body(ids, temperature=0, max_new_tokens=8, ignore_eos=True))
    stop = free["output_ids"][2]
    first = free["output_ids"].index(stop)
    (stopped,) = harness.generate(body(ids, temperature=0, max_new_tokens=8, stop_token_ids=[stop], ignore_eos=True))
    assert stopped["output_ids"] == free["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    (kept,) = harness.generate(
        body(ids, temperature=0, max_new_tokens=8, min_new_tokens=6, stop_token_ids=[stop], ignore_eos=True)
    )
    assert stop not in kept["output_ids"][:6]
