"""Distributions of the sampler against the probabilities that they should have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from miles_core.engines.embedded.protocol import SamplingParams  # noqa: E402
from miles_core.engines.embedded.sampler import Draw, _invert, sample, uniform  # noqa: E402

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, float("-inf")])


def frequencies(count: int = 4_000, **params: object) -> torch.Tensor:
    draws = [Draw(params=SamplingParams(sampling_seed=seed, **params), index=0) for seed in range(count)]  # type: ignore[arg-type]
    tokens = torch.tensor(sample(LOGITS.expand(count, -1), draws).tokens)
    return torch.bincount(tokens, minlength=len(LOGITS)) / count


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [4, 0]),
        ({"top_p": 0.7}, [4, 0]),
        ({"top_p": 0.01}, [4]),
        ({"min_p": 0.1}, [4, 0, 1]),
        ({"top_k": 3, "min_p": 0.2}, [4, 0]),
        ({"min_new_tokens": 1, "stop_token_ids": frozenset({4})}, [0, 1, 2, 3]),
    ],
)
def test_draws_follow_the_truncated_distribution(params: dict[str, object], kept: list[int]) -> None:
    probs = (LOGITS / float(params.get("temperature", 1.0))).softmax(-1)  # type: ignore[arg-type]
    mask = torch.zeros_like(probs)
    mask[kept] = 1
    expected = probs * mask / (probs * mask).sum()
    got = frequencies(**params)
    assert (got[mask == 0] == 0).all()
    assert torch.allclose(got, expected, atol=0.03)


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    draws = [
        Draw(params=SamplingParams(sampling_seed=seed, top_k=top_k), index=2)
        for seed, top_k in ((1, -1), (2, 9), (3, -1))
    ]
    together = sample(logits, draws).tokens
    assert together == [sample(logits[row : row + 1], [draw]).tokens[0] for row, draw in enumerate(draws)]


def test_uniform_numbers_are_uniform_and_unlike() -> None:
    numbers = torch.tensor([[uniform(seed, index) for index in range(100)] for seed in range(100)], dtype=torch.float64)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert numbers.unique().numel() == numbers.numel()
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(numbers.var()) == pytest.approx(1 / 12, abs=0.003)
    centred = numbers - 0.5
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 0.003
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 0.003


def test_inversion_never_picks_a_weight_of_zero() -> None:
    weights = torch.zeros(1, 1000)
    weights[0, [3, 255, 256, 700]] = torch.tensor([1e-7, 1.0, 1e-7, 1.0])
    for number in (0.0, 1e-9, 0.25, 0.5, 0.75, 1 - 2**-53):
        token = int(_invert(weights, torch.tensor([number], dtype=torch.float64)))
        assert float(weights[0, token]) > 0


def test_log_probs_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(FloatingPointError, match=r"sequences \[1\]"):
        sample(
            torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), [Draw(params=SamplingParams(sampling_seed=0), index=0)] * 2
        )
