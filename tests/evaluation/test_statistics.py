"""Statistics of an evaluation against slow references."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.evaluation.statistics import mean_and_error, pass_at_k


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    outcomes = [1] * correct + [0] * (samples - correct)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(correct, samples, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


@pytest.mark.parametrize(("samples", "k"), [(4, 0), (4, 5)])
def test_pass_at_k_needs_enough_samples(samples: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(1, samples, k)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=2, max_size=20))
def test_error_is_over_prompts(per_prompt: list[list[float]]) -> None:
    means = [statistics.fmean(rewards) for rewards in per_prompt]
    mean, error = mean_and_error(per_prompt)
    assert mean == pytest.approx(statistics.fmean(means), abs=1e-9)
    assert error == pytest.approx(statistics.stdev(means) / len(means) ** 0.5, abs=1e-7)


def test_prompts_without_a_score_do_not_count() -> None:
    assert mean_and_error([[1.0], [], [0.0]])[0] == 0.5
    with pytest.raises(ValueError, match="no scored sample"):
        mean_and_error([[], []])


def test_one_prompt_has_no_spread() -> None:
    assert mean_and_error([[0.25, 0.75]]) == (0.5, 0.0)
