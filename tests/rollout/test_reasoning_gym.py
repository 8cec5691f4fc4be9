"""Procedural rows: pure functions of their config, the two splits apart whatever drew them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.contracts.rewards import Sample
from miles_core.errors import DataError, RewardError
from miles_core.rollout.rewards.answers import AnswerConfig
from miles_core.rollout.rewards.procedural import ReasoningGymReward

pytest.importorskip("reasoning_gym")
from miles_core.rollout.sources.reasoning_gym import (
    HELD_OUT_SHARE,
    ReasoningGymConfig,
    ReasoningGymSource,
    held_out,
)

# Few different questions, so that sets drawn by seeds alone would overlap.
SMALL = {"name": "basic_arithmetic", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def source(*families: Any, **options: Any) -> ReasoningGymSource:
    return ReasoningGymSource(ReasoningGymConfig(families=families or (SMALL,), **options))


def questions(of: ReasoningGymSource, *, epoch: int = 0) -> list[str]:
    return [of.prompt(i, epoch=epoch).messages[-1]["content"] for i in range(len(of))]


@pytest.mark.parametrize(("seed", "other"), [(0, 0), (0, 1), (3, 3)])
def test_held_out_rows_never_occur_in_training(seed: int, other: int):
    train = set(questions(source(size=300, seed=seed)))
    heldout = set(questions(source(size=100, seed=other, split="heldout")))
    assert train
    assert heldout
    assert not train & heldout
    assert set(questions(source(size=300, seed=other, fresh_epochs=True), epoch=7)).isdisjoint(heldout)


def test_the_split_is_a_property_of_the_question():
    asked = questions(source(size=100)) + questions(source(size=100, split="heldout"))
    assert [held_out("basic_arithmetic", q) for q in asked] == [False] * 100 + [True] * 100
    share = sum(held_out("f", str(i)) for i in range(4000)) / 4000
    assert abs(share - 1 / HELD_OUT_SHARE) < 5 * (0.25 * 0.75 / 4000) ** 0.5


def test_rows_are_pure_functions_of_their_place():
    rows, again = source(size=20), source(size=20)
    assert [rows.prompt(i) for i in range(20)] == [again.prompt(i) for i in reversed(range(20))][::-1]
    assert len({rows.prompt(i).prompt_id for i in range(20)}) == 20
    assert questions(rows, epoch=1) == questions(rows)
    assert questions(source(size=20, seed=1)) != questions(rows)


def test_fresh_epochs_draw_new_rows_and_say_so():
    rows = source({"name": "basic_arithmetic"}, size=20, fresh_epochs=True)
    assert questions(rows, epoch=1) != questions(rows)
    assert rows.prompt(0, epoch=1).prompt_id == "basic_arithmetic:train:1:0"


def test_weights_are_shares_of_the_rows():
    rows = source({"name": "leg_counting", "weight": 3}, "basic_arithmetic", size=400)
    counts = Counter(rows.prompt(i).metadata["family"] for i in range(400))
    assert abs(counts["leg_counting"] - 300) < 5 * (400 * 0.75 * 0.25) ** 0.5


def test_examples_are_training_questions_and_no_row_repeats_one():
    rows = source(size=150, shots=3, system="S", template="Q: {prompt}")
    heldout = source(size=20, shots=3, split="heldout", seed=5)
    shown = [m["content"] for m in rows.prompt(0).messages if m["role"] == "user"][:-1]
    assert [m["role"] for m in rows.prompt(0).messages] == ["system", *["user", "assistant"] * 3, "user"]
    assert len(set(shown)) == 3
    assert not any(held_out("basic_arithmetic", text.removeprefix("Q: ")) for text in shown)
    assert not set(shown) & set(questions(rows))
    assert [f"Q: {m['content']}" for m in heldout.prompt(0).messages if m["role"] == "user"][:-1] == shown


def test_inline_style_is_one_message():
    (message,) = source(size=1, shots=2, style="inline", template="Question: {prompt}\nAnswer:").prompt(0).messages
    parts = message["content"].split("\n\n")
    assert len(parts) == 3
    assert parts[-1].endswith("\nAnswer:")
    assert all(part.startswith("Question: ") for part in parts)


async def test_the_reward_is_the_familys_own_scorer(make_sample: Callable[..., Sample]):
    rows = source("basic_arithmetic", "leg_counting", "acre", size=12)
    prompts = [rows.prompt(i) for i in range(12)]
    json.dumps([dict(p.metadata) for p in prompts])  # survives every store
    reward = ReasoningGymReward(AnswerConfig(extract="first_line"))
    right = [make_sample(f"{p.label}\nbye", **p.metadata) for p in prompts]
    wrong = [make_sample("no idea", **p.metadata) for p in prompts]
    assert await reward.score(right) == [1.0] * 12
    assert all(score < 0.2 for score in await reward.score(wrong))
    assert await reward.score([make_sample("", **prompts[0].metadata)]) == [0.0]


async def test_prompts_of_another_source_cannot_be_scored(make_sample: Callable[..., Sample]):
    (error,) = await ReasoningGymReward(AnswerConfig()).score([make_sample("1", episode="g.4")])
    assert isinstance(error, RewardError)
    assert "episode g.4" in str(error)
    assert "metadata lacks family, config, draw" in str(error)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("basic_arithmetics", {}, "there is no such family; .*did you mean 'basic_arithmetic'"),
        ({"name": "basic_arithmetic", "config": {"terms": 1}}, {}, "field 'config': refuses its options"),
        ({"name": "basic_arithmetic", "config": {"min_terms": -1}}, {}, "refuses its options"),
        ("rush_hour", {"shots": 1}, "no reference answers to show"),
        (SMALL, {"shots": 100_000}, "too few"),
    ],
)
def test_what_cannot_be_drawn(family: Any, options: dict[str, int], reason: str):
    with pytest.raises(DataError, match=reason):
        source(family, **options).prompt(0)


def test_families_that_depend_on_the_hash_seed_need_a_fixed_one(monkeypatch: pytest.MonkeyPatch):
    from miles_core.rollout.sources import reasoning_gym

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    reasoning_gym._cached.cache_clear()
    with pytest.raises(DataError, match="PYTHONHASHSEED=0"):
        source("word_ladder").prompt(0)


def test_config_refuses_nonsense():
    for wrong in ({"families": ()}, {"families": ("a",), "size": 0}, {"families": ({"name": "a", "weight": 0},)}):
        with pytest.raises(ValidationError):
            ReasoningGymConfig(**wrong)
