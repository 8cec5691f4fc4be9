"""Sizes of models against those that transformers builds, and the layouts that a scenario allows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from miles_core.errors import ConfigError
from miles_core.simulation.sync_scenario import load_sync_scenario, sync_scenario_of
from miles_core.simulation.sync_weights import KNOWN_MODELS, ModelSection, WeightsSection

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulations" / "sync" / "deepseek_v3.toml"
LAYERS = 4
"""Of the models that are built: three dense at most, and one with experts."""


def built(kind: str, **keys: Any) -> torch.nn.Module:
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=LAYERS, **keys)
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


CASES = {
    "glm-4.7-flash": ("Glm4MoeLite", {}),
    "glm-4.5-air": ("Glm4Moe", {"head_dim": 128}),
    "glm-5": ("GlmMoeDsa", {}),
    "glm-5-4-layers": ("GlmMoeDsa", {}),
    "qwen3-30b-a3b": ("Qwen3Moe", {"head_dim": 128}),
    "qwen3-235b-a22b": (
        "Qwen3Moe",
        {"head_dim": 128, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64},
    ),
    "kimi-k2": (
        "DeepseekV3",
        {"n_routed_experts": 384, "num_attention_heads": 64, "vocab_size": 163840, "first_k_dense_replace": 1},
    ),
}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_parameters_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    kind, keys = CASES[name]
    section = ModelSection.model_validate({"like": name, "num_hidden_layers": LAYERS})
    (whole,) = section.stages(1)
    assert whole.parameters == pytest.approx(sum(p.numel() for p in built(kind, **keys).parameters()), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("glm-4.7-flash", 30), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235), ("glm-5", 744), ("kimi-k2", 1026)],
)
def test_known_models_have_the_size_in_their_names(name: str, billions: float) -> None:
    (whole,) = ModelSection.model_validate({"like": name}).stages(1)
    assert whole.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_tensors_are_those_of_the_checkpoint() -> None:
    """transformers packs a layer's experts; a checkpoint has three tensors an expert. Heads' norms are left out."""
    names = [name for name, _ in built("Qwen3Moe", head_dim=128).named_parameters()]
    plain = [name for name in names if not any(part in name for part in ("mlp.experts", "q_norm", "k_norm"))]
    (whole,) = ModelSection.model_validate({"like": "qwen3-30b-a3b", "num_hidden_layers": LAYERS}).stages(1)
    assert whole.tensors == len(plain) + LAYERS * 128 * 3


@pytest.mark.parametrize("stages", [1, 2, 3, 8, 61])
def test_stages_add_up_and_the_first_have_the_odd_layers(stages: int) -> None:
    section = ModelSection.model_validate({"like": "kimi-k2"})
    (whole,) = section.stages(1)
    parts = section.stages(stages)
    assert len(parts) == stages
    assert sum(p.parameters for p in parts) == pytest.approx(whole.parameters)
    assert sum(p.tensors for p in parts) == whole.tensors
    layer = 384 * 3 * 7168 * 2048
    experts = [round(p.experts / layer) for p in parts]
    assert sum(experts) == 60  # the first layer of 61 is dense
    assert max(experts) - min(experts) <= 1


def test_a_tied_head_travels_once_and_lives_on_both_ends_of_a_pipeline() -> None:
    keys = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 100, "intermediate_size": 8}
    keys |= {"num_attention_heads": 2, "head_dim": 4}
    tied, free = (ModelSection.model_validate({**keys, "tie_word_embeddings": tie}) for tie in (True, False))
    assert free.stages(1)[0].parameters - tied.stages(1)[0].parameters == 800
    assert tied.stages(2) == free.stages(2)


def test_a_rank_holds_its_share_and_all_of_what_is_not_divided() -> None:
    (whole,) = ModelSection.model_validate({"like": "glm-5"}).stages(1)
    assert whole.a_rank(1) == whole.parameters
    assert whole.a_rank(64) * 64 == pytest.approx(whole.parameters + 63 * whole.whole)


def test_a_size_alone_is_spread_evenly() -> None:
    parts = WeightsSection(parameters=8e9, tensors=100).stages(4)
    assert [(p.parameters, p.tensors) for p in parts] == [(2e9, 25.0)] * 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.tensor=3", "no multiple of tensor × pipeline × context = 24"),
        ("trainer.expert=32", "a stage's 16 GPUs are no multiple of expert = 32"),
        ("model.num_hidden_layers=4", "8 stages for 4 layers"),
        ("engines.tensor=48", "no multiple of tensor = 48"),
        ("weights.parameters=1e9", "weights.tensors"),
        ("model.like='glm-6'", "these are: glm-4.7-flash"),
        ("model.moe_intermediate_size=0", "n_routed_experts needs moe_intermediate_size"),
        ("model.intermediate_size=0", "dense layers need intermediate_size"),
        ("cluster.nics=0", "greater than or equal to 1"),
        ("publish.buckets=2", "did you mean 'bucket'?"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_sync_scenario(EXAMPLE, [override])


def test_one_of_model_and_weights() -> None:
    layouts = {"trainer": {"nodes": 1}, "engines": {"nodes": 1}}
    with pytest.raises(ConfigError, match="give one of"):
        sync_scenario_of(layouts, {})
    both = {**layouts, "model": {"like": "glm-5"}, "weights": {"parameters": 1e9, "tensors": 9}}
    with pytest.raises(ConfigError, match="give one of"):
        sync_scenario_of(both, {})
