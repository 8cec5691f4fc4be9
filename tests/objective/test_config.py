"""`[objective]` of a config: everything that is registered can be chosen, and what cannot work is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.config.load import load_config, loaded_from_tree
from miles_core.config.preflight import preflight
from miles_core.plugins import PluginManager
from miles_core.training.worker import build_objective

ROOT = Path(__file__).parents[2]
PLUGINS = PluginManager.discover(enable=["core"])
KINDS = {"algorithm": "miles_advantage_estimators", "terms": "miles_loss_terms", "corrections": "miles_corrections"}


def config(**objective):
    tree = load_config(ROOT / "examples" / "tiny.toml").resolved()
    return loaded_from_tree({**tree, "objective": objective}, {})


def problems(**objective):
    return [str(p) for p in preflight(config(**objective), PLUGINS).problems if p.key.startswith("objective")]


# What each name needs beside itself.
BESIDE = {
    "gspo": {"policy": {"ratio": "sequence"}},
    "none": {"terms": ["supervised"]},
    "ppo": {"terms": ["policy", "value"]},
    "value": {"algorithm": "ppo"},
}


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, hook in KINDS.items() for name in PLUGINS.names(hook)])
def test_every_registered_part_can_be_chosen_by_a_config(key, name):
    if name == "distillation":
        pytest.skip("needs a teacher: tests/training/test_distillation.py")
    chosen = {key: name if key == "algorithm" else [name], **BESIDE.get(name, {})}
    assert problems(**chosen) == []
    objective = build_objective(config(**chosen).config, PLUGINS)
    parts = [objective.estimator, *(t.term for t in objective.terms), *(c for _, c in objective.corrections)]
    assert any(isinstance(part, PLUGINS.find(KINDS[key], name).component) for part in parts)


def test_sections_and_coefficients_reach_the_parts():
    loaded = config(
        algorithm="grpo",
        terms=["policy", "entropy"],
        corrections=["tis"],
        grpo={"scale": "none"},
        policy={"clip_high": 0.28},
        entropy={"coefficient": 0.01},
        tis={"high": 3.0},
    )
    assert preflight(loaded, PLUGINS).problems == ()
    objective = build_objective(loaded.config, PLUGINS)
    assert objective.estimator.config.scale == "none"
    assert [(t.name, t.coefficient) for t in objective.terms] == [("policy", 1.0), ("entropy", 0.01)]
    assert objective.terms[0].term.config.clip_high == 0.28
    assert objective.corrections[0][1].config.high == 3.0


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"algorithm": "gspo"}, "needs objective.policy.ratio to be 'sequence'"),
        ({"algorithm": "ppo"}, "no term trains the critic"),
        ({"terms": ["policy", "value"]}, "trains a critic on returns, which grpo does not give"),
        ({"algorithm": "none"}, "without advantages the policy term is 0"),
        ({"kl": {"coefficient": 0.1}}, "has no effect: allowed: grpo, policy"),
        ({"polcy": {"clip_high": 0.3}}, "did you mean 'policy'"),
        ({"terms": ["policy", "policy"]}, "names 'policy' twice"),
        ({"policy": {"coefficient": "big"}}, "must be a finite number"),
        ({"policy": {"coefficient": float("nan")}}, "must be a finite number"),
        ({"tis": {"coefficient": 1.0}, "corrections": ["tis"]}, "unknown key"),
        ({"terms": ["kl"], "kl": {"estimator": "k1"}}, "vanishes in expectation"),
        ({"algorithm": "reinforce_pp", "reinforce_pp": {"kl_estimator": "k3"}}, "no effect while kl_coefficient is 0"),
    ],
)
def test_what_cannot_work_is_explained(objective, said):
    assert any(said in problem for problem in problems(**objective)), problems(**objective)


def test_the_examples_say_what_their_papers_do():
    gspo = build_objective(load_config(ROOT / "examples" / "gspo.toml").config, PLUGINS)
    assert gspo.terms[0].term.config.ratio == "sequence"
    drgrpo = build_objective(load_config(ROOT / "examples" / "drgrpo.toml").config, PLUGINS)
    assert (drgrpo.aggregation, drgrpo.estimator.config.scale) == ("constant", "none")
    assert drgrpo.constant_length == 6  # [sampling] max_new_tokens
