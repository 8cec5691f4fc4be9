"""Estimates from config.json and headers."""

from __future__ import annotations

import json

import pytest

from miles_core.errors import ModelError
from miles_core.models.memory import memory_estimate, parameter_count, read_config
from miles_core.models.tiny import build_tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    target = tmp_path_factory.mktemp("tiny")
    build_tiny(target, seed=0)
    return target


def test_parameters_are_counted_from_headers(directory):
    from transformers import AutoModelForCausalLM

    assert parameter_count(directory) == AutoModelForCausalLM.from_pretrained(directory).num_parameters()


def test_training_keeps_four_float32_copies(directory):
    count = parameter_count(directory)
    estimate = memory_estimate(directory, role="train", tokens=512)
    assert estimate.weights + estimate.gradients + estimate.optimizer == 16 * count
    low = memory_estimate(directory, role="train", tokens=512, dtype="bfloat16", shards=4)
    assert low.weights == count + 2 * count  # a quarter of the masters, and a whole bfloat16 copy
    assert low.activations == estimate.activations / 2
    assert estimate.total == sum(
        (estimate.weights, estimate.gradients, estimate.optimizer, estimate.activations, estimate.logits)
    )


def test_checkpointing_saves_activations(directory):
    plain, saved = (
        memory_estimate(directory, role="train", tokens=512, checkpointing=c).activations for c in (False, True)
    )
    assert saved < plain


def test_the_cache_of_a_generating_process(directory):
    estimate = memory_estimate(directory, role="generate", tokens=1000, dtype="bfloat16")
    assert estimate.kv_cache == 1000 * 2 * 2 * 2 * 16 * 2  # tokens · (K, V) · layers · heads · width · bytes
    assert estimate.gradients == estimate.optimizer == 0


def test_the_text_part_of_a_multimodal_config_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": {"hidden_size": 8}}))
    assert read_config(tmp_path)["hidden_size"] == 8


def test_unreadable_directories_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read config\.json"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="no weights"):
        parameter_count(tmp_path)
