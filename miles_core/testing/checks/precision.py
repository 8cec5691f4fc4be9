"""Laws of precision contracts: deterministic bytes, one exclusion list, a round trip that is stable.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_core.testing.kit import Case, Check

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS"]

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def exclusion_is_a_function_of_the_name(case: Case) -> None:
    first, second = case.create(), case.create()
    for name in NAMES:
        answers = [contract.excluded(name) for contract in (first, second, first)]
        assert all(isinstance(answer, bool) for answer in answers), f"excluded({name!r}) is {answers[0]!r}, no bool"
        assert len(set(answers)) == 1, f"excluded({name!r}) changes from call to call"


def excluded_weights_stay_as_they_are(case: Case) -> None:
    contract = case.create()
    for name, weight in _weights():
        if not contract.excluded(name):
            continue
        stored = contract.quantize(name, weight)
        assert set(stored) == {name}, f"the excluded {name} is stored as {sorted(stored)}"
        assert _bytes(stored) == _bytes({name: weight}), f"the excluded {name} is changed by quantize()"


def quantize_is_deterministic_to_the_byte(case: Case) -> None:
    first, second = case.create(), case.create()
    for name, weight in _weights():
        kept = weight.clone()
        stored = [_bytes(contract.quantize(name, weight)) for contract in (first, second, first)]
        assert stored[0] == stored[1] == stored[2], f"{name} is quantised to other bytes the second time"
        assert bool((kept == weight).all()), f"quantize({name!r}) changes its input"


def the_round_trip_is_stable(case: Case) -> None:
    contract = case.create()
    for name, weight in _weights():
        stored = contract.quantize(name, weight)
        meant = contract.dequantize(name, stored)
        assert meant.shape == weight.shape, f"{name} comes back with shape {tuple(meant.shape)}"
        assert meant.dtype == weight.dtype, f"{name} comes back as {meant.dtype}, expected {weight.dtype}"
        assert _bytes(contract.quantize(name, meant)) == _bytes(stored), (
            f"{name}: quantising what the stored tensors mean gives other tensors, so two stages would disagree"
        )


def the_round_trip_is_near(case: Case) -> None:
    contract = case.create()
    for name, weight in _weights():
        meant = contract.dequantize(name, contract.quantize(name, weight))
        error = float((meant.float() - weight.float()).norm() / weight.float().norm())
        assert error < 0.5, f"{name} comes back with a relative error of {error:.2f}: it is another weight"


def checkpoint_config_is_json(case: Case) -> None:
    config: Mapping[str, Any] = case.create().checkpoint_config()
    try:
        same = json.loads(json.dumps(dict(config))) == dict(config)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"checkpoint_config() does not fit into config.json: {error}") from error
    assert same, "checkpoint_config() reads otherwise once it was written as JSON (tuples, keys that are no strings)"


CHECKS: tuple[Check, ...] = (
    exclusion_is_a_function_of_the_name,
    excluded_weights_stay_as_they_are,
    quantize_is_deterministic_to_the_byte,
    the_round_trip_is_stable,
    the_round_trip_is_near,
    checkpoint_config_is_json,
)


def _weights() -> list[tuple[str, torch.Tensor]]:
    """bf16 weights of usual size, with an outlier in each matrix."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = []
    for name in NAMES:
        shape = (256,) if "norm" in name else (256, 384)
        weight = 0.02 * torch.randn(shape, generator=generator)
        weight.view(-1)[7] = 0.9
        weights.append((name, weight.to(torch.bfloat16)))
    return weights


def _bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every tensor, by name."""
    import torch

    return {
        name: (
            str(t.dtype),
            tuple(t.shape),
            t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in tensors.items()
    }
