"""Where buckets land: in the parameters where they can be them, else beside them; what was written is what is held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from miles_core.data.checksums import checksum
from miles_core.engines.embedded.landing import Landing, Place

from .conftest import Harness
from .test_engine import other_weights

Weights = dict[str, torch.Tensor]


def receive(harness: Harness, landing: Landing, weights: Weights) -> Place:
    """A bucket arrives."""
    place = landing.prepare([(n, str(t.dtype)[6:], list(t.shape)) for n, t in weights.items()])
    place.data.copy_(torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in weights.values()]))
    harness.call(lambda: harness.engine.write(place.tensors, adopt=place.adopt))
    return place


def held(harness: Harness, weights: Weights) -> bool:
    found = harness.call(harness.engine.checksums)
    return all(found[name] == checksum(t.contiguous().numpy().tobytes()) for name, t in weights.items())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_bucket_is_held_version_after_version(
    family: str, start: Callable[..., Harness], model_directory: Callable[[str], Path]
) -> None:
    harness = start(family)
    harness.call(lambda: harness.engine.pause("retract"))
    landing, weights = Landing(harness.app._weights), other_weights(model_directory(family))
    experts = {name: t for name, t in weights.items() if ".experts." in name}
    others = {name: t for name, t in weights.items() if name not in experts}
    places = []
    for version in range(3):
        sent = [{name: t + version for name, t in bucket.items()} for bucket in (others, experts) if bucket]
        places.append([receive(harness, landing, bucket) for bucket in sent])
        assert all(held(harness, bucket) for bucket in sent)
        landing.tidy()
    if experts:  # they are parts of parameters, and a norm of 32 bytes puts the others out of alignment
        assert not any(place.adopt for version in places for place in version)
    else:
        assert all(place.adopt for (place,) in places)
        assert len({place.data.data_ptr() for (place,) in places}) == 1  # the second lands in the parameters


def test_a_bucket_out_of_alignment_is_copied(
    start: Callable[..., Harness], model_directory: Callable[[str], Path]
) -> None:
    harness = start("qwen3")
    harness.call(lambda: harness.engine.pause("retract"))
    landing, weights = Landing(harness.app._weights), other_weights(model_directory("qwen3"))
    odd = {"model.layers.0.self_attn.q_norm.weight": torch.randn(8)}  # 32 bytes
    bucket = odd | {name: t for name, t in weights.items() if name not in odd}
    first = receive(harness, landing, bucket)
    assert not first.adopt
    assert held(harness, bucket)
    first.data.zero_()  # the next bucket comes into the same memory
    assert held(harness, bucket)


def test_what_a_session_does_not_use_is_let_go(
    start: Callable[..., Harness], model_directory: Callable[[str], Path]
) -> None:
    harness = start("qwen3")
    harness.call(lambda: harness.engine.pause("retract"))
    landing, weights = Landing(harness.app._weights), other_weights(model_directory("qwen3"))
    head = {"lm_head.weight": weights["lm_head.weight"]}
    receive(harness, landing, head)
    landing.tidy()
    landing.tidy()
    place = receive(harness, landing, {name: t * 2 for name, t in head.items()})
    assert harness.engine._runner.model.lm_head.weight.data_ptr() == place.data.data_ptr()
    assert held(harness, {name: t * 2 for name, t in head.items()})
